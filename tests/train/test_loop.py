"""The loop: it learns, it resumes bit for bit, its files are whole, its errors are sentences."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fdbd import networks as models
from fdbd import train
from fdbd.data.datasets import Images
from fdbd.networks.checkpoint import load_plain

SMALL = {
    "model": "tiny_networks:batch",
    "num_classes": 4,
    "epochs": 3,
    "batch_size": 16,
    "lr": 0.05,
    "whiten": False,
    "start": "",
    "sizes": (),
    "ema": 0.9,
    "linear_epochs": 10,
}
QUIET = {"progress": False, "log": "none"}


class Interrupted(Exception):
    pass


class Breaking:
    """Images that raise at the given read, as a kill would stop a run: between two steps,
    anywhere."""

    def __init__(self, images, at):
        self.images = images
        self.at = at
        self.reads = 0
        self.shape = images.shape
        self.dtype = images.dtype

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.reads += 1
        if self.reads > self.at:
            raise Interrupted
        return self.images[index]


def equal(one, other):
    one = one.state_dict()
    other = other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("recipe", ["zoo-ce", "zoo-supcon", "csi-small", "ce-resnet18"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_resuming_after_an_interruption_gives_the_same_bits(
    recipe, optimizer, networks, data, test_data, tmp_path
):
    options = {**SMALL, **QUIET, "optimizer": optimizer, "checkpoint_steps": 4, "epochs": 2}
    if recipe == "ce-resnet18":
        options["ema"] = 0.0
    whole = train.train(recipe, data, test_data, tmp_path / "whole", **options)
    # In the second of two epochs of six steps, one step after a checkpoint.
    broken = Breaking(data[0], 9)
    with pytest.raises(Interrupted):
        train.train(recipe, (broken, data[1]), test_data, tmp_path / "broken", **options)
    assert load_plain(tmp_path / "broken" / "checkpoint.pt")["step"] == 8
    resumed = train.train(recipe, data, test_data, tmp_path / "broken", **options)
    assert equal(whole.model, resumed.model)
    for row in whole.history + resumed.history:
        del row["seconds"]
    assert whole.history == resumed.history
    assert whole.test_accuracy == resumed.test_accuracy


def test_it_learns_and_writes_what_it_says(networks, data, test_data, tmp_path):
    # A flip would change the class of these images.
    augment = train.Augment(flip=False)
    options = {**SMALL, "epochs": 12, "lr": 0.2, "augment": augment}
    result = train.train("zoo-ce", data, test_data, tmp_path / "run", progress=False, **options)
    assert result.test_accuracy > 0.9
    assert not result.model.training
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoint.pt",
        "log.csv",
        "model.safetensors",
    ]
    with open(tmp_path / "run" / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == list(range(1, 13))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    loaded = models.create("tiny_networks:batch", num_classes=4, checkpoint=result.path)
    assert equal(loaded, result.model)
    about = models.read_metadata(result.path)
    assert about["recipe"] == "zoo-ce"
    assert float(about["test_accuracy"]) == result.test_accuracy


def test_supcon_with_its_linear_head_learns(networks, data, test_data):
    augment = train.Augment(area=(0.7, 1.0), flip=False)
    options = {
        **SMALL,
        "epochs": 15,
        "lr": 0.2,
        "augment": augment,
        "linear_flip": False,
        "linear_epochs": 40,
    }
    result = train.train("zoo-supcon", data, test_data, **QUIET, **options)
    assert result.test_accuracy > 0.9
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_a_finished_run_is_not_repeated(networks, data, tmp_path):
    first = train.train("zoo-ce", data, out=tmp_path, **QUIET, **SMALL)
    again = train.train("zoo-ce", data, out=tmp_path, **QUIET, **SMALL)
    assert equal(first.model, again.model)
    assert first.history == again.history
    fresh = train.train("zoo-ce", data, out=tmp_path, resume=False, **QUIET, **SMALL)
    assert equal(first.model, fresh.model)


def test_another_seed_is_another_model_and_training_leaves_the_callers_generator_alone(
    networks, data
):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = train.train("zoo-ce", data, **QUIET, **SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    other = train.train("zoo-ce", data, **QUIET, **{**SMALL, "seed": 1})
    assert not equal(one.model, other.model)


def test_arrays_tensors_images_and_datasets_are_the_same_data(networks, data):
    images = data[0].copy()
    labels = data[1].copy()
    # As a memory map.
    images.flags.writeable = labels.flags.writeable = False
    tensors = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    singles = [(image, int(label)) for image, label in zip(*data)]
    one, *others = (
        train.train("zoo-ce", given, **QUIET, **{**SMALL, "epochs": 1})
        for given in (data, Images(images, labels), tensors, singles)
    )
    assert all(equal(one.model, other.model) for other in others)


def test_without_data_the_presets_dataset_is_loaded_by_name(networks, data, test_data, monkeypatch):
    asked = []

    def load(name, split):
        asked.append((name, split))
        return data if split == "train" else test_data

    monkeypatch.setattr("fdbd.data.datasets.load", load)
    result = train.train("zoo-ce", **QUIET, **{**SMALL, "epochs": 1})
    assert asked == [("cifar10", "train"), ("cifar10", "test")]
    assert result.test_accuracy is not None


def test_tensorboard_log_or_the_pip_command(networks, data, tmp_path):
    options = {**SMALL, "epochs": 1, "progress": False, "log": "tensorboard"}
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install tensorboard"):
            train.train("zoo-ce", data, out=tmp_path, **options)
    else:
        train.train("zoo-ce", data, out=tmp_path, **options)
        assert list(tmp_path.glob("events.*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 3}, "a recipe has no colour"),
        (
            {"objective": "triplet"},
            "objective is 'triplet', expected 'cross_entropy', 'several_labels', 'supcon' or 'csi'",
        ),
        ({"optimizer": "lion"}, "expected 'sgd', 'adamw' or 'lars'"),
        ({"schedule": "bumpy"}, "schedule is 'bumpy', expected"),
        ({"epochs": 0}, "epochs is 0, expected a positive number"),
        ({"lr": 0.0}, "lr is 0.0, expected a positive number"),
        ({"batch_size": 1000}, "a batch of 1000 is larger than the 96 images"),
        ({"num_classes": 3}, "labels run from 0 to 3, outside 0 to 2"),
        ({"whiten": True}, "whiten is for the network resnet10_compact"),
        ({"sizes": (8,), "augment": train.Augment(pad=0)}, "sizes needs random crops"),
        ({"log": "paper"}, "log is 'paper', expected 'csv'"),
    ],
)
def test_bad_options_are_one_sentence(changes, message, networks, data):
    with pytest.raises(ValueError, match=message):
        train.train("zoo-ce", data, **{**QUIET, **SMALL, **changes})


def test_bad_data_are_one_sentence(networks, data):
    images, labels = data
    for given, message in [
        (
            (images.astype(np.float32), labels),
            r"holds float32 \(96, 16, 16, 3\), expected uint8 \(N, height",
        ),
        ((images[..., 0], labels), r"holds uint8 \(96, 16, 16\), expected"),
        ((images, labels[:5]), r"labels of shape \(5,\) and dtype int64, expected 96 integers"),
        ((images, None), "training needs labelled images"),
        ((images[:0], labels[:0]), "training needs labelled images"),
        (7, "expected .* not int"),
    ]:
        with pytest.raises(ValueError, match=message):
            train.train("zoo-ce", given, **QUIET, **SMALL)
    with pytest.raises(ValueError, match="no training preset 'zoo': there are ce-resnet18"):
        train.train("zoo", data)


def test_a_checkpoint_of_another_recipe_is_refused(networks, data, tmp_path):
    train.train("zoo-ce", data, out=tmp_path, **QUIET, **{**SMALL, "epochs": 1})
    with pytest.raises(
        ValueError,
        match=r"belongs to another training \(lr was 0.05, is 0.01\): choose another folder",
    ):
        train.train("zoo-ce", data, out=tmp_path, **QUIET, **{**SMALL, "epochs": 1, "lr": 0.01})


def test_a_diverging_run_stops_and_says_so(networks, data):
    with pytest.raises(RuntimeError, match=r"the loss is (nan|inf) at step \d+: lower lr"):
        train.train(
            "zoo-ce",
            data,
            **QUIET,
            **{**SMALL, "model": "tiny_networks:still", "lr": 1e30, "warmup": 0.0},
        )


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(networks, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, numpy as np, torch\n"
        "torch.set_num_threads(1)\n"
        "from fdbd import train\n"
        "r = np.random.default_rng(0)\n"
        "data = (r.integers(0, 256, (512, 32, 32, 3)).astype(np.uint8), r.integers(0, 4, 512))\n"
        "train.train('zoo-ce', data, out=sys.argv[1], progress=False, checkpoint_steps=5,\n"
        "            num_classes=4, model='tiny_networks:batch', epochs=12, batch_size=16,\n"
        "            whiten=False, sizes=())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(networks)}

    def start(name):
        return subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / name)], env=environment
        )

    assert start("whole").wait(300) == 0
    victim = start("killed")
    saved = tmp_path / "killed" / "checkpoint.pt"
    while not saved.exists() or load_plain(saved)["step"] < 40:
        assert victim.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    assert start("killed").wait(300) == 0
    whole, resumed = (
        models.checkpoint.read_weights(tmp_path / n / "model.safetensors")
        for n in ("whole", "killed")
    )
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_training_can_start_from_a_zoo_model():
    images = np.zeros((16, 32, 32, 3), np.uint8)
    options = {
        "epochs": 1,
        "batch_size": 16,
        "lr": 1e-12,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "nesterov": False,
    }
    trained = train.train(
        "ce-small",
        (images, np.zeros(16, np.int64)),
        start="cifar10-ce",
        ema=0.0,
        **options,
        **QUIET,
    )
    start = models.zoo("cifar10-ce")
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(trained.model.parameters(), start.parameters())
    )
    with pytest.raises(
        ValueError,
        match="weights are those of a resnet10_compact and do not fit a resnet18",
    ):
        train.train("ce-resnet18", (images, np.zeros(16, np.int64)), start="cifar10-ce", **QUIET)


@pytest.mark.parametrize("recipe", ["zoo-ce", "zoo-supcon", "csi-small"])
def test_a_smoke_run_takes_so_many_steps_of_the_recipe_and_reads_no_more_images_than_those(
    recipe, networks, data, test_data, tmp_path
):
    options = {**SMALL, "epochs": 20}
    result = train.train(
        recipe, data, test_data, tmp_path / "run", max_steps=2, progress=False, **options
    )
    assert len(result.history) == 1
    assert result.test_accuracy is not None
    assert (tmp_path / "run" / "log.csv").is_file()
    assert load_plain(tmp_path / "run" / "checkpoint.pt")["step"] == 2
    about = models.read_metadata(result.path)
    assert about["stopped_after_steps"] == "2"
    # The rate is that of the whole recipe, not of one that ends after two steps.
    expected = result.config.rate(1.5 / (6 * 20))
    assert result.history[0]["lr"] == pytest.approx(expected)


def test_a_smoke_run_is_the_beginning_of_the_whole_one(networks, data, tmp_path):
    options = {**SMALL, **QUIET, "epochs": 1, "ema": 0.0}
    whole = train.train("ce-resnet18", data, out=tmp_path / "whole", **options)
    train.train("ce-resnet18", data, out=tmp_path / "part", max_steps=4, **options)
    resumed = train.train("ce-resnet18", data, out=tmp_path / "part", **options)
    assert equal(whole.model, resumed.model)


def test_a_negative_number_of_steps_is_refused(data):
    with pytest.raises(ValueError, match="max_steps is -1"):
        train.train("ce-small", data, max_steps=-1, progress=False)


def test_a_checkpoint_from_before_an_option_of_the_augmentation_is_resumed(
    networks, data, tmp_path
):
    options = {**SMALL, **QUIET, "epochs": 1}
    train.train("ce-resnet18", data, out=tmp_path, max_steps=2, **options)
    state = load_plain(tmp_path / "checkpoint.pt")
    described = json.loads(state["config"])
    del described["augment"]["blur_p"]
    torch.save({**state, "config": json.dumps(described)}, tmp_path / "checkpoint.pt")
    result = train.train("ce-resnet18", data, out=tmp_path, **options)
    assert len(result.history) == 2
