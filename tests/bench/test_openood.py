"""OpenOOD's protocols as commands, each whole on a miniature in OpenOOD's own layout: its lists'
form, its folders, its checkpoints' key names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fdbd import cli
from fdbd.bench import Results
from fdbd.bench.openood import list_protocols, missing_files, protocol
from fdbd.networks import create

# Lines of the real lists: a path below images_classic or images_largescale, and a label; −1 for
# OOD.
CLASSIC = {"cifar10", "cifar100", "tin", "mnist", "svhn", "texture", "places365", "cifar10c"}
PER_SET = 12


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def images_of(data: str, name: str) -> str:
    """The folder at the top that the images of a list lie in, as in OpenOOD's lists."""
    part = name.partition("_")[2]
    if part in ("imagenet", "imagenet200"):
        return "imagenet_1k/val" if name.startswith(("test", "val")) else "imagenet_1k/train"
    return {
        "textures": "texture",
        "imagenet200_v2": "imagenet_v2",
        "imagenet200_c": "imagenet_c",
    }.get(part, part.replace("imagenet200", "imagenet"))


def write_list(root: Path, spec: str, side: int, classes: int, seed: int) -> None:
    """One list with its images: class-coloured noise for ID, other noise for OOD."""
    rng = np.random.default_rng(seed)
    data, name = spec.removeprefix("openood:").split("/")
    is_id = name.partition("_")[2].startswith(data) or "cifar10c" in name or "_imagenet_" in name
    folder = images_of(data, name)
    base = "images_classic" if folder.split("/")[0] in CLASSIC else "images_largescale"
    place = root / base / folder
    place.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(PER_SET):
        label = number % classes if is_id else -1
        shade = (
            np.array([label * 20 % 256, label * 7 % 256, 90])
            if is_id
            else rng.integers(256, size=3)
        )
        height, width = (side, side) if "_c" in name else (side, side + number % 3)
        noise = rng.integers(-60, 60, (height, width, 3))
        pixels = np.clip(shade + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{name}_{number}.png")
        lines.append(f"{folder}/{name}_{number}.png {label}")
    list_file = root / "benchmark_imglist" / data / f"{name}.txt"
    list_file.parent.mkdir(parents=True, exist_ok=True)
    list_file.write_text("\n".join(lines) + "\n")


def openood_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights under the names of OpenOOD's checkpoints: `shortcut`, `fc`."""
    found = {}
    for name, value in model.state_dict().items():
        if name.startswith("linear."):
            name = name.replace("linear.", "fc.")
        found[name] = value
    return found


def miniature(root: Path, name: str, network: str | None, side: int) -> None:
    """Everything that a protocol needs, small."""
    config = protocol(name, network)
    classes = min(config.num_classes or 10, PER_SET // 2)
    sets = [config.train, config.id, config.validation, config.ood_validation]
    sets += [*config.ood.values(), *config.shifted.values()]
    for seed, spec in enumerate(sets):
        write_list(root, str(spec), side, classes, seed)
    runs = [config.for_seed(seed) for seed in config.seeds] or [config]
    for number, run_config in enumerate(runs):
        torch.manual_seed(number)
        model = create(run_config.model, run_config.num_classes).eval()
        # One class is predicted for all, so that some predictions are right.
        head = [part for part in model.modules() if isinstance(part, nn.Linear)][-1]
        with torch.no_grad():
            # torchvision's ViT begins with a head of zeros.
            nn.init.normal_(head.weight, std=0.02)
            head.bias[0] += 9
        path = root / str(run_config.checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(openood_names(model), path)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "openood"
    root.mkdir()
    monkeypatch.setenv("FDBD_DATA", str(root))
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    return root


SMALL = [("openood:cifar10", None, 32), ("openood:cifar100", None, 32)]
LARGE = [
    ("openood:imagenet200", None, 256),
    ("openood:imagenet", "resnet50", 256),
    ("openood:imagenet", "vit_b_16", 256),
    ("openood:imagenet", "swin_t", 256),
]


@pytest.mark.parametrize(
    ("name", "network", "side"),
    [*SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE)],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_command_runs_a_protocol_whole(
    name: str, network: str | None, side: int, own_folders: Path, tmp_path: Path, capsys
) -> None:
    miniature(own_folders, name, network, side)
    chosen = ["--model", network] if network else []
    code, _, err = run(
        capsys, "bench", name, *chosen, "--detectors", "fdbd,msp,energy,scale+energy",
        "--tune", "--no-latency", "--out", tmp_path / "out", "--format", "json,html,md,tex,csv",
        "--metrics", "auroc,fpr95,aurc",
    )  # fmt: skip
    assert code == 0, err
    config = protocol(name, network)
    found = Results.from_json(tmp_path / "out" / "results.json")
    assert found.setting.positive == "ood"
    assert set(found.setting.groups) == {"near", "far"}
    assert list(found.setting.ood) == list(config.ood)
    assert list(found.setting.shifted) == list(config.shifted)
    assert found.setting.runs == max(1, len(config.seeds))
    assert not found.failures
    near = found.value(found.row("fdbd"), "near", "auroc")
    if config.seeds:
        assert near.runs == 3
        assert "±" in (tmp_path / "out" / "results.md").read_text()
        assert r"$\pm$" in (tmp_path / "out" / "results.tex").read_text()
        assert "auroc_std" in (tmp_path / "out" / "results.csv").read_text().splitlines()[0]
    assert ("full_auroc" in found.metrics) == bool(config.shifted)
    # Rows with a grid say what was chosen; the others were not tuned.
    assert found.row("scale+energy").tuned.startswith("percentile=")
    assert found.row("msp").tuned == ""
    table = (tmp_path / "out" / "results.md").read_text()
    assert "tuned on OOD validation data" in table
    # The whole protocol ran, so the published means stand beside ours.
    published = json.loads((tmp_path / "out" / "results.json").read_text())["setting"]["published"]
    expected = config.published.auroc["msp"][0]
    assert published["auroc"]["msp"]["near"] == pytest.approx(expected / 100)
    assert f"{expected:.2f} (" in table
    assert f"published {expected:.2f}" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fewer_seeds_run_alone_and_without_published_numbers(
    own_folders: Path, tmp_path: Path, capsys
) -> None:
    miniature(own_folders, "openood:cifar100", None, 32)
    code, _, err = run(
        capsys, "bench", "openood:cifar100", "--seeds", "0,2", "--detectors", "msp",
        "--no-latency", "--out", tmp_path / "out", "--format", "json",
    )  # fmt: skip
    assert code == 0, err
    found = Results.from_json(tmp_path / "out" / "results.json")
    assert found.setting.runs == 2
    assert found.setting.published is None


def test_what_is_missing_is_named_with_file_folder_and_source_before_anything_runs(
    own_folders: Path, tmp_path: Path, capsys
) -> None:
    miniature(own_folders, "openood:cifar10", None, 32)
    (own_folders / "benchmark_imglist" / "cifar10" / "test_tin.txt").unlink()
    lost = "results/cifar10_resnet18_32x32_base_e100_lr0.1_default/s1/best.ckpt"
    (own_folders / lost).unlink()
    for path in (own_folders / "images_classic" / "svhn").iterdir():
        path.unlink()
    code, _, err = run(capsys, "bench", "openood:cifar10", "--out", tmp_path / "out")
    assert code == 2
    assert "missing: test_tin.txt in benchmark_imglist/cifar10/" in err
    assert "missing: best.ckpt in results/cifar10_resnet18_32x32_base_e100_lr0.1_default/s1/" in err
    assert "images_classic/svhn/" in err
    assert err.count("download") >= 3
    assert "3 files of openood:cifar10 are missing" in err
    assert not (tmp_path / "out").exists()


def test_nothing_is_there_and_everything_is_named() -> None:
    for name in list_protocols():
        config = protocol(name)
        runs = [config.for_seed(seed) for seed in config.seeds] or [config]
        lists = 4 + len(config.ood) + len(config.shifted)
        assert len(missing_files(runs)) == lists + len(runs)


def test_names_that_there_are_not_are_answered_with_those_that_there_are(capsys) -> None:
    code, _, err = run(capsys, "bench", "openood:cifar11")
    assert code == 2
    assert "openood:cifar100" in err
    code, _, err = run(capsys, "bench", "openood:imagenet", "--model", "alexnet")
    assert code == 2
    assert "resnet50, swin_t, vit_b_16" in err
    code, _, err = run(capsys, "bench", "--seeds", "0,1")
    assert code == 2
    assert "takes a config whose 'checkpoint' has {seed}" in err


def test_the_commands_of_the_page_name_protocols_and_networks_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "openood.md").read_text(encoding="utf-8")
    lines = [line.split() for line in page.splitlines() if line.startswith("fdbd bench openood:")]
    assert len(lines) >= 3
    for _, _, name, *options in lines:
        network = options[options.index("--model") + 1] if "--model" in options else None
        assert protocol(name, network).positive == "ood"
    for name in list_protocols():
        assert f"`{name}`" in page
