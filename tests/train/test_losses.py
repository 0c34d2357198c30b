"""Contrastive losses against loops that follow the papers' formulas word by word, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fdbd.train.objectives import (
    CSI,
    CrossEntropy,
    SeveralLabels,
    SupCon,
    head_of,
    nearest_accuracy,
    rotate,
    supcon,
)


def supcon_by_loops(z, labels, temperature):
    """Khosla et al. (2020), equation 2, one sample, one positive, one negative at a time."""
    total, anchors = 0.0, 0
    for i in range(len(z)):
        positives = [p for p in range(len(z)) if p != i and labels[p] == labels[i]]
        if not positives:
            continue
        denominator = 0.0
        for a in range(len(z)):
            if a != i:
                denominator += math.exp(sum(x * y for x, y in zip(z[i], z[a])) / temperature)
        inner = 0.0
        for p in positives:
            inner += math.log(
                math.exp(sum(x * y for x, y in zip(z[i], z[p])) / temperature) / denominator
            )
        total += -inner / len(positives)
        anchors += 1
    return total / anchors


@pytest.mark.parametrize("temperature", [0.07, 0.1, 0.5])
def test_supcon_is_its_definition(temperature):
    generator = torch.Generator().manual_seed(1)
    z = F.normalize(torch.randn(17, 5, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.randint(0, 4, (17,), generator=generator)
    # Alone in its class: no positive, no part of the mean.
    labels[3] = 99
    expected = supcon_by_loops(z.tolist(), labels.tolist(), temperature)
    assert float(supcon(z, labels, temperature)) == pytest.approx(expected, rel=1e-12)
    assert float(supcon(z.float(), labels, temperature)) == pytest.approx(expected, rel=1e-5)


def test_supcon_gradient_is_finite_and_right():
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 0, 1, 1, 2, 3])
    assert torch.autograd.gradcheck(lambda z: supcon(F.normalize(z, dim=1), labels, 0.1), (z,))


def test_with_one_label_an_image_supcon_is_nt_xent():
    generator = torch.Generator().manual_seed(3)
    z = F.normalize(torch.randn(8, 4, generator=generator, dtype=torch.float64), dim=1)
    similarity = (z @ z.T / 0.5).fill_diagonal_(float("-inf"))
    other_view = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    assert float(supcon(z, torch.arange(4).repeat(2), 0.5)) == pytest.approx(
        float(F.cross_entropy(similarity, other_view))
    )


def test_supcon_refuses_a_batch_without_positives():
    with pytest.raises(ValueError, match="no sample of this batch has a positive"):
        supcon(torch.eye(3), torch.arange(3))


def test_nearest_accuracy_counts_neighbours_not_itself():
    z = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), dim=1)
    assert float(nearest_accuracy(z, torch.tensor([0, 0, 1, 1]))) == 1.0
    assert float(nearest_accuracy(z, torch.tensor([0, 1, 2, 2]))) == 0.5


def test_rotate_stacks_four_quarter_turns():
    images = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4)
    turned = rotate(images)
    assert turned.shape == (8, 3, 4, 4)
    assert torch.equal(turned[:2], images)
    assert torch.equal(turned[4:6], images.flip(2, 3))
    assert torch.equal(turned[2:4].rot90(3, (2, 3)), images)


class Flat(nn.Module):
    """Pixels to six features to three classes: enough to be an objective's model."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


def test_csi_contrasts_turns_as_other_instances():
    torch.manual_seed(0)
    objective = CSI(Flat(), temperature=0.5, projection=4).double()
    # Two views of three images.
    images = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    loss, accuracy = objective(images, labels)
    features = objective.model(rotate(images))
    z = F.normalize(objective.projector(features), dim=1).detach()
    # (image, turn) of every row.
    instance = [(place % 3, place // 6) for place in range(24)]
    number = [sorted(set(instance)).index(i) for i in instance]
    turns = torch.tensor([turn for _, turn in instance])
    expected = supcon_by_loops(z.tolist(), number, 0.5) + float(
        F.cross_entropy(objective.turn(features), turns).detach()
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert 0 <= float(accuracy) <= 1


def test_labelled_csi_has_positives_of_the_same_class_and_turn():
    torch.manual_seed(0)
    objective = CSI(Flat(), temperature=0.5, projection=4, labelled=True).double()
    images = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1])
    loss, _ = objective(images, labels)
    features = objective.model(rotate(images))
    z = F.normalize(objective.projector(features), dim=1).detach()
    turns = torch.arange(4).repeat_interleave(6)
    joint = labels.repeat(8) * 4 + turns
    expected = supcon_by_loops(z.tolist(), joint.tolist(), 0.5) + float(
        F.cross_entropy(objective.turn(features), turns).detach()
    )
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)


def test_csi_learns_to_tell_turns():
    torch.manual_seed(0)
    images = torch.zeros(16, 3, 4, 4)
    # A bright upper row says which way is up.
    images[:, :, 0] = torch.rand(16, 3, 4) + 1
    objective = CSI(Flat(), projection=4)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=0.02)
    for _ in range(60):
        loss, accuracy = objective(images.repeat(2, 1, 1, 1), torch.zeros(16).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(accuracy) > 0.95


def test_objectives_take_the_head_and_give_the_batch_accuracy():
    torch.manual_seed(0)
    model = Flat()
    assert head_of(model) == ("head", model.head)
    images = torch.randn(5, 3, 4, 4)
    labels = torch.tensor([0, 1, 2, 0, 1])
    loss, accuracy = CrossEntropy(model)(images, labels)
    assert float(loss.detach()) == pytest.approx(
        float(F.cross_entropy(model(images), labels).detach())
    )
    assert float(accuracy) == pytest.approx(
        float((model(images).argmax(1) == labels).float().mean())
    )
    # Headless now.
    assert SupCon(model).model(images).shape == (5, 6)
    with pytest.raises(ValueError, match="has no linear layer"):
        head_of(nn.Sequential(nn.Conv2d(3, 4, 3)))


def test_the_loss_of_several_labels_is_one_cross_entropy_per_label():
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
    images = torch.randn(8, 3, 4, 4)
    labels = torch.tensor([0, 1, 1, 4, 2, 2, 2, 2])
    loss, accuracy = SeveralLabels(model, 5)(images, labels)
    wanted = 0.0
    right = 0
    for number in range(2):
        own = slice(4 * number, 4 * number + 4)
        upper = torch.cat([images[own][0], images[own][1]], dim=2)
        lower = torch.cat([images[own][2], images[own][3]], dim=2)
        logits = model(torch.cat([upper, lower], dim=1)[None])[0].tolist()
        for label, logit in enumerate(logits):
            is_there = label in labels[own].tolist()
            margin = logit if is_there else -logit
            wanted += math.log1p(math.exp(-margin)) / 2
            right += (logit > 0) == is_there
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-5)
    assert float(accuracy) == pytest.approx(right / 10)
