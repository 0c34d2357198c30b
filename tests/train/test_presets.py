"""Presets: the paper's numbers, the schedules they stand for, and small ones that are small."""

import pytest

from fdbd import networks as models
from fdbd import train
from fdbd.train.schedule import learning_rate


def rate(preset, epoch):
    return learning_rate(
        preset.schedule, epoch / preset.epochs, preset.lr, milestones=preset.milestones, warmup=preset.warmup
    )


def test_the_papers_cross_entropy_schedule():
    p = train.preset("ce-resnet18")
    assert (p.model, p.epochs, p.lr) == ("resnet18", 100, 0.1)
    assert [rate(p, e) for e in (0, 49, 50, 74, 75, 89, 90, 99)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4]
    )


def test_densenets_own_schedule():
    p = train.preset("ce-densenet")
    assert (p.model, p.epochs, p.batch_size) == ("densenet100", 300, 64)
    assert [rate(p, e) for e in (149, 150, 225)] == pytest.approx([0.1, 0.01, 0.001])


def test_the_papers_supcon_settings():
    p = train.preset("supcon-resnet18")
    assert (p.objective, p.batch_size, p.epochs, p.temperature) == ("supcon", 1024, 500, 0.1)
    assert [rate(p, e) for e in (0, 250, 500)] == pytest.approx([0.5, 0.25, 0.0])
    imagenet = train.preset("supcon-imagenet")
    assert (imagenet.epochs, imagenet.num_classes, imagenet.model) == (700, 1000, "torchvision:resnet50")


def test_one_cycle_rises_then_falls_to_zero():
    rates = [learning_rate("triangle", step / 100, 1.0, warmup=0.2) for step in range(101)]
    assert max(rates) == rates[20] == 1.0
    assert rates[0] == rates[100] == 0.0
    assert rates == sorted(rates[:21]) + sorted(rates[21:], reverse=True)
    assert learning_rate("constant", 0.9, 0.3) == 0.3


def test_a_restart_runs_the_schedule_twice_the_second_time_lower():
    rates = [learning_rate("triangle", step / 30, 1.0, warmup=0.2, restart=(2 / 3, 0.5)) for step in range(30)]
    assert rates[:20] == pytest.approx([learning_rate("triangle", step / 20, 1.0, warmup=0.2) for step in range(20)])
    assert rates[20:] == pytest.approx([learning_rate("triangle", step / 10, 0.5, warmup=0.2) for step in range(10)])
    with pytest.raises(ValueError, match="expected a fraction of training"):
        learning_rate("triangle", 0.5, 1.0, restart=(1.5, 0.5))


@pytest.mark.parametrize("name", train.list_presets())
def test_every_preset_has_a_model_and_a_summary(name):
    p = train.preset(name)
    assert p.name == name
    assert p.summary
    assert p.model in models.list_models() or p.model.startswith("torchvision:")
