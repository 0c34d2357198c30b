"""A guard of maps from files to files: fit, score with masks, explain, gallery, inspect and ONNX."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fdbd
from fdbd.core.preprocessing import Preprocess
from fdbd.data.label_maps import MaskFolder, mask_of, overlaid, read_mask
from fdbd.decision.guard_file import open_guard

pq = pytest.importorskip("pyarrow.parquet")

SIZE = 24
# The whole picture, and the middle of it.
WHOLE = Preprocess(SIZE, (0.5,) * 3, (0.25,) * 3, crop="none")
MIDDLE = Preprocess(SIZE, (0.5,) * 3, (0.25,) * 3)
FACTORY = """
import torch
from torch import nn

class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 1), nn.ReLU())
        self.norm = nn.BatchNorm2d(12)
        self.classifier = nn.Conv2d(12, 4, 1)
    def forward(self, x):
        return self.classifier(self.norm(self.body(x)))

def segmenter():
    torch.manual_seed(0)
    model = Segmenter()
    nn.init.uniform_(model.norm.weight)
    return model.eval()

def pooled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1),
                          nn.Conv2d(8, 4, 1), nn.Flatten())
    nn.init.uniform_(model[1].weight)
    return model.eval()
"""


def write_images(folder: Path, count: int, seed: int, size: tuple[int, int] = (20, 30)) -> None:
    random = np.random.default_rng(seed)
    for number in range(count):
        place = folder / ("left" if number % 2 else "right")
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 255, (4, 5, 3), np.uint8))
        coarse.resize(size[::-1], Image.Resampling.BILINEAR).save(place / f"{number:03d}.png")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mapfactory.py").write_text(FACTORY)
    write_images(tmp_path / "train", 30, seed=0)
    write_images(tmp_path / "fresh", 40, seed=1)
    write_images(tmp_path / "inbox", 5, seed=2)
    (tmp_path / "inbox" / "broken.png").write_bytes(b"\x89PNG no")
    return tmp_path


def fit(result, *more: object, preprocess: Preprocess = WHOLE, model: str = "segmenter") -> dict:
    described = json.dumps(preprocess.to_dict())
    return result(
        "fit", f"mapfactory:{model}", "train", "--calibration", "fresh", "--alpha", 0.1,
        "--preprocess", described, *more,
    )  # fmt: skip


def opened(folder: Path) -> fdbd.Guard:
    return open_guard(folder / "guard.safetensors", model="mapfactory:segmenter").guard


def inbox(folder: Path) -> list[Path]:
    return sorted((folder / "inbox").glob("*/*.png"))


def test_a_folder_of_images_becomes_a_guard_whose_rows_and_masks_are_its_decisions(
    folder, result, run
) -> None:
    fitted = fit(result)
    assert (fitted["fit_rows"], fitted["calibration_rows"]) == (30, 40)
    assert "at most 0.1 of an image's pixels are flagged" in fitted["guarantee"]
    summary = result(
        "score",
        "guard.safetensors",
        "inbox",
        "--masks",
        "masks",
        "--model",
        "mapfactory:segmenter",
        "--workers",
        1,
    )
    assert (summary["rows"], summary["unreadable"]) == (6, 1)
    broken, *rows = pq.read_table("scores.parquet").to_pylist()
    assert broken["is_ood"]
    assert broken["ood_share"] is None
    assert not (folder / "masks" / "broken.png.png").exists()
    files = inbox(folder)
    decision = opened(folder)(WHOLE([np.asarray(Image.open(file)) for file in files]))
    assert [row["path"] for row in rows] == [f"{file.parent.name}/{file.name}" for file in files]
    shares = [row["ood_share"] for row in rows]
    np.testing.assert_allclose(shares, decision.ood_share, atol=1e-6)
    np.testing.assert_allclose([row["score"] for row in rows], decision.image_scores, rtol=1e-5)
    assert [row["is_ood"] for row in rows] == decision.image_is_ood.tolist()
    for row, labels, is_ood in zip(rows, decision.labels, decision.is_ood):
        assert row["label"] == int(torch.bincount(labels.flatten()).argmax())
        mask = np.asarray(Image.open(folder / "masks" / f"{row['path']}.png"))
        # Of the image's own size: the nearest of the 12 × 12 positions.
        lines = (np.arange(20) + 0.5).astype(float) * 12 / 20
        columns = (np.arange(30) + 0.5) * 12 / 30
        expected = is_ood.numpy()[lines.astype(int)][:, columns.astype(int)]
        assert np.array_equal(mask, np.where(expected, 255, 0))

    code, _, _ = run("gallery", "scores.parquet", "--images", "inbox", "--masks", "masks")
    assert code == 0
    page = (folder / "gallery.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 5
    explained = result(
        "explain",
        "guard.safetensors",
        files[0],
        "--out",
        "why.png",
        "--model",
        "mapfactory:segmenter",
    )
    assert explained["ood_share"] == pytest.approx(shares[0], abs=1e-6)
    assert sum(entry["share"] for entry in explained["classes"]) == pytest.approx(1)
    weighed = sum(entry["share"] * entry["ood_share"] for entry in explained["classes"])
    assert weighed == pytest.approx(shares[0], abs=1e-6)
    assert Image.open(folder / "why.png").width > 500
    found = result("inspect", "guard.safetensors")
    assert found["Threshold"]["kind"] == "conformal, of maps"


@pytest.mark.slow
def test_the_commands_of_the_tutorial_segmentation_md_run(folder, run) -> None:
    """With the small network of this module in place of the public one."""
    (folder / "train").rename(folder / "photos")
    shutil.copyfile(inbox(folder)[0], folder / "inbox" / "a.jpg")
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "segmentation.md"
    text = page.read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("fdbd ")]
    served = commands.pop()
    assert served == ["fdbd", "serve", "deeplab.safetensors"]
    for _, command, *words in commands:
        given = [word.replace("public:deeplab-voc", "mapfactory:segmenter") for word in words]
        if command == "fit":
            given += ["--preprocess", json.dumps(WHOLE.to_dict())]
        elif command != "gallery":
            # A public network needs no such word: its guard's file names no code.
            given += ["--model", "mapfactory:segmenter"]
        code, _, errors = run(command, *given)
        assert code == 0, errors
    assert sorted(path.name for path in (folder / "masks").iterdir()) == [
        "a.jpg.png",
        "left",
        "right",
    ]
    assert (folder / "deeplab.onnx").is_file()


def test_label_maps_teach_a_detector_that_needs_classes(folder, result, run) -> None:
    refused = fit_refused(run, "--detector", "mds")
    assert "--label-maps" in refused
    random = np.random.default_rng(0)
    for file in sorted((folder / "train").glob("*/*.png")):
        classes = random.integers(0, 4, (20, 30)).astype(np.uint8)
        classes[:, :7] = 255
        path = folder / "maps" / file.parent.name / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(classes).save(path)
    assert fit(result, "--detector", "mds", "--label-maps", "maps")["fit_rows"] == 30
    guard = fdbd.Guard(opened(folder).classifier, "mds")
    images = []
    labels = []
    for file in sorted((folder / "train").glob("*/*.png")):
        images.append(np.asarray(Image.open(file)))
        classes = np.asarray(Image.open(folder / "maps" / file.parent.name / file.name))
        enlarged = Image.fromarray(classes).resize((SIZE, SIZE), Image.Resampling.NEAREST)
        labels.append(np.asarray(enlarged).astype(np.int64))
    with warnings.catch_warnings():
        # The labels are random.
        warnings.simplefilter("ignore")
        guard.fit([(WHOLE(images), torch.from_numpy(np.stack(labels)))], progress=False)
    for name, value in opened(folder).detector.state_dict().items():
        torch.testing.assert_close(value, guard.detector.state_dict()[name], rtol=1e-3, atol=1e-4)
    (folder / "maps" / "left" / "001.png").unlink()
    assert "1 of 30 images have no label map" in fit_refused(run, "--label-maps", "maps")


def fit_refused(run, *more: object, model: str = "segmenter") -> str:
    described = json.dumps(WHOLE.to_dict())
    code, _, error = run(
        "fit", f"mapfactory:{model}", "train", "--calibration", "fresh", "--alpha", 0.1,
        "--preprocess", described, *more,
    )  # fmt: skip
    assert code == 2
    return " ".join(error.split())


def test_what_one_of_the_two_kinds_of_guards_cannot_do_is_refused_in_one_sentence(
    folder, result, run
) -> None:
    assert "leave --label-maps out" in fit_refused(run, "--label-maps", "train", model="pooled")
    assert "leave --engine out" in fit_refused(run, "--engine", "ray")
    fit(result)
    code, _, error = run(
        "score", "guard.safetensors", "inbox", "--nearest", "--model", "mapfactory:segmenter"
    )
    assert (code, "leave it out" in " ".join(error.split())) == (2, True)
    fit(result, model="pooled")
    code, _, error = run(
        "score", "guard.safetensors", "inbox", "--masks", "masks", "--model", "mapfactory:pooled"
    )
    assert code == 2
    assert "one verdict per image" in " ".join(error.split())


def test_onnx_runtime_gives_the_maps_of_torch(folder, result) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    fit(result)
    image = inbox(folder)[0]
    about = result(
        "export",
        "guard.safetensors",
        "--example",
        image,
        "--model",
        "mapfactory:segmenter",
        "--out",
        "maps.onnx",
    )
    assert about["verification"]["verified"]
    assert about["threshold"]["maps"]
    session = onnxruntime.InferenceSession(folder / "maps.onnx")
    images = WHOLE([np.asarray(Image.open(file)) for file in inbox(folder)])
    images[2, 0, 3, 3] = torch.nan
    decision = opened(folder)(images)
    names = [output.name for output in session.get_outputs()]
    answers = dict(zip(names, session.run(None, {"images": images.numpy()})))
    readable = torch.tensor([0, 1, 3, 4])
    for name, wanted in (
        ("logits", decision.logits),
        ("score", decision.scores),
        ("image_score", decision.image_scores),
        ("image_p_value", decision.image_p_values),
    ):
        got = torch.from_numpy(answers[name])
        torch.testing.assert_close(got[readable], wanted[readable], rtol=1e-4, atol=1e-4)
    assert answers["is_ood"][2].all()
    assert answers["ood_share"][2] == 1
    assert answers["image_is_ood"][2]
    assert (answers["is_ood"] == decision.is_ood.numpy()).mean() > 0.99


def mask_of_a_wide_picture() -> np.ndarray:
    """The mask of a picture of 40 × 100 pixels whose upper half is OOD. The preprocessing cuts out
    the 40 columns in the middle."""
    is_ood = np.zeros((6, 6), bool)
    is_ood[:3] = True
    return mask_of(is_ood, MIDDLE, 40, 100)


def test_a_mask_lies_where_the_preprocessing_has_cut_the_picture_out() -> None:
    mask = mask_of_a_wide_picture()
    assert mask.shape == (40, 100)
    # What the model did not see is grey.
    assert set(np.unique(mask[:, :30])) == {128}
    assert set(np.unique(mask[:, 70:])) == {128}
    assert set(np.unique(mask[:20, 30:70])) == {255}
    assert set(np.unique(mask[20:, 30:70])) == {0}


def test_masks_are_written_below_their_folder_whatever_an_image_is_called(tmp_path) -> None:
    mask = mask_of_a_wide_picture()
    masks = MaskFolder(tmp_path / "masks")
    masks.write("a/b.jpg", mask)
    again = read_mask(tmp_path / "masks" / "a" / "b.jpg.png")
    assert np.array_equal(again, mask)
    masks.write(str(tmp_path / "elsewhere.jpg"), mask)
    masks.write("../../outside.jpg", mask)
    assert not (tmp_path / "elsewhere.jpg.png").exists()
    assert (tmp_path / "masks" / "outside.jpg.png").is_file()


def test_an_overlay_reddens_what_is_ood_and_refuses_an_image_of_another_size() -> None:
    mask = mask_of_a_wide_picture()
    grey = np.full((40, 100, 3), 100, np.uint8)
    tinted = overlaid(grey, mask)
    assert np.array_equal(tinted[30, 50], [100, 100, 100])
    assert tinted[10, 50, 0] > 150 > tinted[10, 50, 2]
    with pytest.raises(ValueError, match=re.escape("the image has 9 × 9 pixels")):
        overlaid(np.zeros((9, 9, 3), np.uint8), mask)
