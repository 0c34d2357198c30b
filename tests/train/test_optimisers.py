"""LARS against its formula, written out, and what a recipe's optimiser decays."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fdbd.train import preset
from fdbd.train.optimisers import LARS, optimiser_of


def by_hand(weight, gradients, lr, momentum, decay, trust):
    velocity = np.zeros_like(weight)
    for gradient in gradients:
        g = gradient + decay * weight
        length = np.linalg.norm(weight)
        steepness = np.linalg.norm(g)
        scale = trust * length / steepness if length > 0 and steepness > 0 else 1.0
        velocity = momentum * velocity + scale * g
        weight = weight - lr * velocity
    return weight


@pytest.mark.parametrize("start", ["random", "zero"])
def test_lars_takes_the_steps_of_its_formula(start):
    random = np.random.default_rng(0)
    initial = random.standard_normal((4, 3)) * (start == "random")
    gradients = random.standard_normal((5, 4, 3))
    weight = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimiser = LARS([weight], lr=0.5, momentum=0.9, weight_decay=0.1, trust=0.02)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        optimiser.step()
    expected = by_hand(initial, gradients, 0.5, 0.9, 0.1, 0.02)
    assert np.allclose(weight.detach().numpy(), expected, rtol=1e-12)


def test_a_step_of_lars_does_not_depend_on_the_scale_of_the_loss():
    found = []
    for scale in (1.0, 1000.0):
        weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        weight.grad = scale * torch.tensor([1.0, 0.0])
        LARS([weight], lr=1.0, trust=0.01).step()
        found.append(weight.detach())
    assert torch.allclose(found[0], found[1])
    assert torch.allclose(found[0], torch.tensor([3.0 - 0.01 * 5, 4.0]))


def test_lars_goes_on_from_its_state_as_if_it_had_not_stopped():
    def run(steps, state=None, weight=None):
        weight = torch.nn.Parameter(torch.ones(3) if weight is None else weight.clone())
        optimiser = LARS([weight], lr=0.1)
        if state is not None:
            optimiser.load_state_dict(state)
        for _ in range(steps):
            weight.grad = weight.detach() ** 2 + 1
            optimiser.step()
        return weight.detach(), optimiser.state_dict()

    whole, _ = run(4)
    half, state = run(2)
    assert torch.equal(run(2, state, half)[0], whole)


@pytest.mark.parametrize(("name", "kind"), [("csi-resnet18", LARS), ("ce-small", torch.optim.SGD)])
def test_a_recipe_names_its_optimiser(name, kind):
    assert isinstance(optimiser_of(preset(name), torch.nn.Linear(2, 2)), kind)


def test_biases_do_not_decay_unless_the_recipe_says_so():
    module = torch.nn.Linear(3, 2)
    recipe = replace(preset("ce-small"), weight_decay=0.3)
    groups = optimiser_of(recipe, module).param_groups
    decays = {tuple(p.shape): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {(2, 3): 0.3, (2,): 0.0}
    (group,) = optimiser_of(replace(recipe, decay_all=True), module).param_groups
    assert len(group["params"]) == 2
