"""fit, score, explain and export on real image files, through the program itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fdbd
from fdbd.core import artifact
from fdbd.core.preprocessing import Preprocess
from fdbd.data.inputs import open_images
from fdbd.networks.wrapped import weights_hash

pq = pytest.importorskip("pyarrow.parquet")

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TINY = Preprocess(8, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
TINY_JSON = json.dumps(TINY.to_dict())
FACTORY = """
import torch

def tiny(num_classes=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU(),
                               torch.nn.Linear(16, num_classes))
"""


def make_folder(
    folder: Path, classes: tuple[str, ...], count: int, size: int, seed: int = 0
) -> Path:
    generator = np.random.default_rng(seed)
    for number in range(count):
        place = folder / classes[number % len(classes)] if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 255, (4, 4, 3), np.uint8))
        coarse.resize((size, size), Image.Resampling.BILINEAR).save(place / f"{number:04d}.png")
    return folder


def decided(guard: fdbd.Guard, preprocess: Preprocess, files: list[Path]) -> fdbd.Decision:
    return guard(preprocess([np.asarray(Image.open(file).convert("RGB")) for file in files]))


def assert_rows_are(rows: list[dict], decision: fdbd.Decision) -> None:
    assert [row["label"] for row in rows] == decision.labels.tolist()
    assert [row["is_ood"] for row in rows] == decision.is_ood.tolist()
    torch.testing.assert_close(
        torch.tensor([row["score"] for row in rows]), decision.scores.float(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        torch.tensor([row["p_value"] for row in rows]), decision.p_values.float()
    )


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """A folder with a model factory, its checkpoint, and images of three classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    (tmp_path / "tinyfactory.py").write_text(FACTORY)
    make_folder(tmp_path / "images", ("ant", "bee", "cat"), 60, 8)
    return tmp_path


def fit_tiny(result, *more: object, out: str = "guard.safetensors") -> dict:
    apart = () if "--calibration" in more else ("--network-never-saw-data",)
    return result(
        "fit", "tinyfactory:tiny", "images", "--preprocess", TINY_JSON, "--out", out, *apart, *more
    )


def test_the_zoo_model_goes_from_a_folder_to_decisions_a_picture_and_a_graph(
    tmp_path, monkeypatch, run, result
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "images", CIFAR, 60, 32)
    make_folder(tmp_path / "more" / "deep", (), 13, 40, seed=1)
    (tmp_path / "more" / "broken.png").write_bytes(b"\x89PNG no")
    fitted = result("fit", "cifar10-ce", "images", "--network-never-saw-data")
    assert (fitted["fit_rows"], fitted["calibration_rows"], fitted["left_out"]) == (48, 12, 0)
    summary = result("score", "guard.safetensors", "more", "--batch-size", 8, "--workers", 1)
    rows = pq.read_table("scores.parquet").to_pylist()
    assert (summary["rows"], summary["unreadable"]) == (14, 1)
    assert summary["ood"] == sum(row["is_ood"] for row in rows)
    assert not list(tmp_path.glob("*.parts"))
    broken, *readable = rows
    assert broken["path"] == "broken.png"
    assert broken["is_ood"]
    assert broken["label"] is broken["score"] is broken["p_value"] is None
    assert "not a readable image" in broken["error"]
    files = sorted((tmp_path / "more" / "deep").iterdir())
    assert [row["path"] for row in readable] == [f"deep/{file.name}" for file in files]
    card = fdbd.networks.zoo_card("cifar10-ce")
    guard = fdbd.load("guard.safetensors", fdbd.networks.zoo("cifar10-ce"))
    expected = decided(guard, card.preprocess, files)
    assert_rows_are(readable, expected)
    assert [row["class"] for row in readable] == [CIFAR[label] for label in expected.labels]

    said = result("explain", "guard.safetensors", files[0], "--out", "why.png", "--top", 4)
    assert said["predicted"] == readable[0]["class"]
    why = guard.explain(card.preprocess([np.asarray(Image.open(files[0]))]))
    assert said["boundaries"][0]["name"] == CIFAR[int(why.nearest[0])]
    assert said["boundaries"][0]["distance"] == pytest.approx(
        float(why.nearest_distance[0]), rel=1e-5
    )
    assert (len(said["boundaries"]), said["others"]) == (4, 5)
    assert said["standing"] == pytest.approx(float(why.standing[0]))
    with Image.open("why.png") as picture:
        assert picture.width > 800
    code, out, _ = run("explain", "guard.safetensors", files[0])
    assert code == 0
    assert said["predicted"] in out

    about = result("export", "guard.safetensors", "--example", files[0])
    assert about["class_names"] == list(CIFAR)
    session = onnxruntime.InferenceSession("guard.onnx", providers=["CPUExecutionProvider"])
    images = card.preprocess([np.asarray(Image.open(file)) for file in files]).numpy()
    _, label, score, _, is_ood = session.run(None, {"images": images})
    assert label.tolist() == expected.labels.tolist()
    assert is_ood.tolist() == expected.is_ood.tolist()
    np.testing.assert_allclose(score, expected.scores.numpy(), rtol=1e-3, atol=1e-4)


def test_a_network_of_rectangles_goes_from_a_folder_to_decisions_and_a_graph(tiny, result) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    wide = Preprocess((4, 16), crop="none")
    fitted = result(
        *("fit", "tinyfactory:tiny", "images", "--preprocess", json.dumps(wide.to_dict())),
        "--network-never-saw-data",
    )
    assert fitted["fit_rows"] == 48
    result("score", "guard.safetensors", "images", "--model", "tinyfactory:tiny")
    rows = pq.read_table("scores.parquet").to_pylist()
    model = fdbd.networks.create("tinyfactory:tiny", 3)
    files = [tiny / "images" / row["path"] for row in rows]
    expected = decided(fdbd.load("guard.safetensors", model), wide, files)
    assert_rows_are(rows, expected)
    result("export", "guard.safetensors", "--model", "tinyfactory:tiny")
    session = onnxruntime.InferenceSession("guard.onnx", providers=["CPUExecutionProvider"])
    images = wide([np.asarray(Image.open(file)) for file in files]).numpy()
    assert session.run(["label"], {"images": images})[0].tolist() == expected.labels.tolist()


GREY_FACTORY = """
import torch

def grey(num_classes=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(),
                               torch.nn.Linear(4 * 6 * 8, num_classes))
"""


def test_a_network_of_grey_images_goes_from_a_folder_to_decisions_and_a_graph(tiny, result) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    (tiny / "greyfactory.py").write_text(GREY_FACTORY)
    make_folder(tiny / "fresh", ("ant", "bee", "cat"), 60, 8, seed=1)
    wanted = Preprocess((8, 10), (0.5,), (0.5,), crop="none")
    model = ("--model", "greyfactory:grey")
    fit = ("fit", "greyfactory:grey", "images", "--preprocess", json.dumps(wanted.to_dict()))
    weighed = result(
        *fit, "--calibration", "fresh", "--detector", "auto", "--out", "auto.safetensors"
    )
    assert weighed["fit_rows"] == 60
    fitted = result(*fit, "--calibration", "fresh")
    assert (fitted["fit_rows"], fitted["left_out"]) == (60, 0)
    result("score", "guard.safetensors", "images", *model)
    rows = pq.read_table("scores.parquet").to_pylist()
    files = [tiny / "images" / row["path"] for row in rows]
    guard = fdbd.load("guard.safetensors", fdbd.networks.create("greyfactory:grey", 3))
    pictures = np.stack(
        [np.asarray(Image.open(file).resize((10, 8), 2).convert("L")) for file in files]
    )
    inputs = (torch.from_numpy(pictures)[:, None] / 255 - 0.5) / 0.5
    expected = guard(inputs)
    assert_rows_are(rows, expected)
    result("export", "guard.safetensors", *model)
    session = onnxruntime.InferenceSession("guard.onnx", providers=["CPUExecutionProvider"])
    found = session.run(["label"], {"images": inputs.numpy()})[0]
    assert found.tolist() == expected.labels.tolist()
    card = result("stress", "guard.safetensors", "fresh", *model, "--out", "stress.html")
    assert card["clean"]["total"] == 60
    said = result("explain", "guard.safetensors", files[0], *model, "--out", "why.png")
    assert said["standing"] == pytest.approx(float(guard.explain(inputs[:1]).standing[0]))


def test_a_checkpoint_is_found_again_checked_and_may_move(tiny, run, result) -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(1)
    weights = tiny / "weights.safetensors"
    save_file(fdbd.networks.create("resnet20", 3).state_dict(), weights)
    fitted = result(
        "fit",
        "resnet20",
        "images",
        "--checkpoint",
        weights,
        "--preprocess",
        "cifar10",
        "--network-never-saw-data",
    )
    assert fitted["fit_rows"] == 48
    assert result("score", "guard.safetensors", "images", "--out", "a.parquet")["rows"] == 60
    (tiny / "elsewhere").mkdir()
    moved = weights.rename(tiny / "elsewhere" / "renamed.safetensors")
    code, _, err = run("score", "guard.safetensors", "images", "--out", "b.parquet")
    assert code == 2
    assert "--checkpoint" in err
    assert "Traceback" not in err
    result("score", "guard.safetensors", "images", "--out", "b.parquet", "--checkpoint", moved)
    assert pq.read_table("a.parquet").equals(pq.read_table("b.parquet"))
    other = fdbd.networks.create("resnet20", 3).state_dict()
    other["linear.weight"] = fdbd.networks.load_checkpoint(
        fdbd.networks.create("resnet20", 3), moved
    ).linear.weight.data
    save_file(other, tiny / "other.safetensors")
    code, _, err = run("score", "guard.safetensors", "images", "--checkpoint", "other.safetensors")
    assert code == 2
    assert "not those" in err
    assert not (tiny / "scores.parquet").exists()


def test_a_zoo_model_whose_weights_are_others_now_is_refused(
    tmp_path, monkeypatch, run, result
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "images", CIFAR, 40, 32)
    result("fit", "cifar10-ce", "images", "--network-never-saw-data")
    description, tensors = artifact.read("guard.safetensors")
    assert description["about"]["model"]["weights"] == weights_hash(fdbd.networks.zoo("cifar10-ce"))
    description["about"]["model"]["weights"] = "0" * 64
    artifact.write("guard.safetensors", description, tensors)
    code, _, err = run("score", "guard.safetensors", "images")
    assert code == 2
    assert (
        "the weights of 'cifar10-ce' are not those that 'guard.safetensors' was fitted with" in err
    )


def test_a_guard_does_not_choose_which_code_runs(tiny, run, result) -> None:
    fit_tiny(result)
    code, _, err = run("score", "guard.safetensors", "images")
    assert code == 2
    assert "--model tinyfactory:tiny or --trust-model" in err
    named = result("score", "guard.safetensors", "images", "--model", "tinyfactory:tiny")
    assert named["rows"] == 60
    trusted = result("score", "guard.safetensors", "images", "--trust-model", "--out", "b.parquet")
    assert trusted["rows"] == 60


def test_an_exported_program_takes_a_word_of_trust_and_gives_the_same_scores(
    tiny, run, result
) -> None:
    import tinyfactory

    batch = torch.export.Dim("N")
    program = torch.export.export(
        tinyfactory.tiny().eval(), (torch.zeros(2, 3, 8, 8),), dynamic_shapes=({0: batch},)
    )
    torch.export.save(program, tiny / "tiny.pt2")
    arguments = [
        "fit",
        "tiny.pt2",
        "images",
        "--preprocess",
        TINY_JSON,
        "--out",
        "exported.safetensors",
        "--network-never-saw-data",
    ]
    code, _, err = run(*arguments)
    assert code == 2
    assert "can run code" in err
    result(*arguments, "--trust-model")
    fit_tiny(result)
    result(
        "score", "guard.safetensors", "images", "--model", "tinyfactory:tiny", "--out", "a.parquet"
    )
    result(
        "score",
        "exported.safetensors",
        "images",
        "--model",
        "tiny.pt2",
        "--trust-model",
        "--out",
        "b.parquet",
    )
    ours = pq.read_table("a.parquet")
    theirs = pq.read_table("b.parquet")
    assert ours["label"].equals(theirs["label"])
    np.testing.assert_allclose(ours["score"].to_numpy(), theirs["score"].to_numpy(), rtol=1e-5)


def test_labels_shaping_per_class_and_alpha_go_from_the_command_line_to_the_guard(
    tiny, result
) -> None:
    fitted = fit_tiny(
        result, "--detector", "mds", "--shaping", "react", "--alpha", 0.2, "--holdout", 0.5
    )
    assert fitted["detector"] == "react+mds"
    assert fitted["calibration_rows"] == 30
    guard = fdbd.load("guard.safetensors")
    assert guard.threshold.kind == "conformal"
    assert guard.threshold.target == 0.2
    assert guard.about["class_names"] == ["ant", "bee", "cat"]
    make_folder(tiny / "apart", ("ant", "bee", "cat"), 30, 8, seed=5)
    fitted = fit_tiny(result, "--calibration", "apart", "--per-class")
    assert (fitted["fit_rows"], fitted["calibration_rows"]) == (60, 30)
    assert len(fitted["threshold"]) == 3


def test_images_in_npz_give_the_rows_that_the_same_images_in_files_give(tiny, result) -> None:
    files = sorted((tiny / "images").rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    np.savez_compressed(tiny / "images.npz", x=pixels, y=np.arange(60) % 3)
    fit_tiny(result)
    for data in ("images", "images.npz"):
        result(
            "score", "guard.safetensors", data, "--model", "tinyfactory:tiny", "--out", f"{data}.parquet",
            "--batch-size", 7,
        )  # fmt: skip
    ours = pq.read_table("images.npz.parquet")
    theirs = pq.read_table("images.parquet")
    assert ours["row"].to_pylist() == list(range(60))
    assert ours.drop_columns("row").equals(theirs.drop_columns("path"))
    assert (
        result(
            "fit",
            "tinyfactory:tiny",
            "images.npz",
            "--preprocess",
            TINY_JSON,
            "--network-never-saw-data",
        )["fit_rows"]
        == 48
    )


def test_oversized_cut_and_vanished_images_are_rows_with_an_error(
    tiny, result, monkeypatch
) -> None:
    fit_tiny(result)
    folder = make_folder(tiny / "hostile", (), 4, 8)
    whole = (folder / "0001.png").read_bytes()
    (folder / "0001.png").write_bytes(whole[:-30])
    bomb = bytearray(whole)
    # Width and height in the PNG's header.
    bomb[16:24] = (100_000).to_bytes(4, "big") * 2
    (folder / "0002.png").write_bytes(bytes(bomb))
    (folder / "0005.png").symlink_to(folder / "nowhere.png")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(whole)
    summary = result(
        "score", "guard.safetensors", folder, "--model", "tinyfactory:tiny", "--out", "s.csv"
    )
    assert (summary["rows"], summary["unreadable"]) == (5, 3)
    lines = (tiny / "s.csv").read_text().splitlines()
    assert lines[0].replace('"', "") == "path,label,class,score,p_value,is_ood,error,guard"
    has_error = ["not a readable" in line or "pixels" in line for line in lines[1:]]
    assert has_error == [False, True, True, False, True]
    assert all(",true," in line for line in (lines[2], lines[3], lines[5]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fit", "cifar10-ce", "empty", "--network-never-saw-data"), "holds no image"),
        (("fit", "cifar10-ce", "nowhere/at/all", "--network-never-saw-data"), "does not exist"),
        (("fit", "no-such-model", "images", "--network-never-saw-data"), "no model"),
        (("fit", "resnet20", "images", "--network-never-saw-data"), "--checkpoint"),
        (
            ("fit", "resnet20", "images", "--checkpoint", "nowhere.pt", "--network-never-saw-data"),
            "nowhere.pt",
        ),
        (("fit", "tinyfactory:tiny", "images", "--network-never-saw-data"), "--preprocess"),
        (("fit", "tinyfactory:tiny", "--network-never-saw-data"), "no data"),
        (
            ("fit", "tinyfactory:tiny", "images", "--preprocess", "{", "--network-never-saw-data"),
            "JSON",
        ),
        (
            (
                "fit",
                "tinyfactory:tiny",
                "images",
                "--preprocess",
                TINY_JSON,
                "--detector",
                "nothing",
                "--network-never-saw-data",
            ),
            "nothing",
        ),
        (
            (
                "fit",
                "tinyfactory:tiny",
                "images",
                "--preprocess",
                TINY_JSON,
                "--alpha",
                "0.01",
                "--network-never-saw-data",
            ),
            "99",
        ),
        (
            (
                "fit",
                "tinyfactory:tiny",
                "images",
                "--preprocess",
                TINY_JSON,
                "--out",
                "no/where.safetensors",
                "--network-never-saw-data",
            ),
            "folder",
        ),
        (
            (
                "fit",
                "tinyfactory:tiny",
                "flat",
                "--preprocess",
                TINY_JSON,
                "--detector",
                "mds",
                "--network-never-saw-data",
            ),
            "labels",
        ),
        (("score", "nowhere.safetensors", "images"), "no such file"),
        (("score", "tinyfactory.py", "images"), "safetensors"),
        (("score", "nowhere.safetensors", "empty"), "holds no image"),
        (("explain", "nowhere.safetensors", "x.png"), "no such file"),
        (("explain", "nowhere.safetensors", "x.png", "--out", "why.docx"), "why.docx"),
        (("export", "nowhere.safetensors"), "no such file"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(arguments, words, tiny, run) -> None:
    (tiny / "empty").mkdir()
    make_folder(tiny / "flat", (), 6, 8)
    before = sorted(tiny.iterdir())
    code, _, err = run(*arguments)
    assert code == 2
    assert words in err
    assert (
        len(
            [
                line
                for line in err.strip().splitlines()
                if not line.startswith("fdbd: warning: accuracy")
            ]
        )
        == 1
    )
    assert sorted(path for path in tiny.iterdir() if path.name != "__pycache__") == [
        path for path in before if path.name != "__pycache__"
    ]


def test_a_wrong_ending_of_the_output_is_told_before_any_work(tiny, run, result) -> None:
    fit_tiny(result)
    code, _, err = run(
        "score", "guard.safetensors", "images", "--model", "tinyfactory:tiny", "--out", "a.xlsx"
    )
    assert code == 2
    assert ".parquet or .csv" in err


def test_a_long_and_narrow_image_is_a_row_with_an_error(tiny, result) -> None:
    fit_tiny(result)
    folder = make_folder(tiny / "new", (), 3, 8)
    Image.new("RGB", (3_000_000, 1)).save(folder / "0001.png")
    summary = result("score", "guard.safetensors", "new", "--model", "tinyfactory:tiny")
    assert (summary["rows"], summary["unreadable"]) == (3, 1)
    errors = pq.read_table("scores.parquet")["error"].to_pylist()
    assert errors[0] is errors[2] is None
    assert "3000000 × 1 pixels" in errors[1]


def test_names_that_are_not_utf8_are_escaped(tiny, result) -> None:
    folder = make_folder(tiny / "new" / os.fsdecode(b"\xe9t\xe9"), (), 2, 8)
    try:
        (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(b"broken")
    except OSError:
        pytest.skip("this file system takes only UTF-8")
    (tiny / "images" / "ant").rename(tiny / "images" / os.fsdecode(b"f\xfcnf"))
    fit_tiny(result)
    result(
        "score", "guard.safetensors", "new", "--model", "tinyfactory:tiny", "--out", "scores.csv"
    )
    result("score", "guard.safetensors", "new", "--model", "tinyfactory:tiny")
    rows = pq.read_table("scores.parquet").to_pylist()
    assert [row["path"] for row in rows] == [
        rf"\udce9t\udce9/{name}" for name in ("0000.png", "0001.png", r"caf\udce9.png")
    ]
    assert rows[2]["error"].startswith(r"\udce9t\udce9/caf\udce9.png is not a readable image")
    assert {row["class"] for row in rows[:2]} <= {"bee", "cat", r"f\udcfcnf"}


def test_a_guard_that_names_no_model_takes_the_preprocessing_of_the_one_that_is_named(
    tmp_path, monkeypatch, run, result
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tinyfactory.py").write_text(FACTORY)
    folder = make_folder(tmp_path / "images", (), 30, 40)
    card = fdbd.networks.zoo_card("cifar10-ce")
    model = fdbd.networks.zoo("cifar10-ce")
    files = sorted(folder.iterdir())
    inputs = card.preprocess([np.asarray(Image.open(file)) for file in files])
    fdbd.Guard(model).fit([inputs[:15]]).calibrate([inputs[15:]]).save("guard.safetensors")
    result("score", "guard.safetensors", "images", "--model", "cifar10-ce", "--batch-size", 30)
    rows = pq.read_table("scores.parquet").to_pylist()
    assert_rows_are(rows, fdbd.load("guard.safetensors", model)(inputs))
    assert {row["class"] for row in rows} <= set(CIFAR)
    code, _, err = run("score", "guard.safetensors", "images", "--model", "tinyfactory:tiny")
    assert code == 2
    assert "neither 'guard.safetensors' nor tinyfactory:tiny says how images are prepared" in err


def test_an_array_of_other_images_under_the_same_name_is_other_data(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    keys = []
    for value in (0, 1, 0):
        np.savez("day.npz", x=np.full((3, 4, 4, 3), value, np.uint8))
        keys.append(open_images("npz:day.npz").key)
    assert keys[0] == keys[2] != keys[1]


def test_images_that_are_replaced_by_rename_while_they_are_scored_are_noticed(
    tiny, run, result, monkeypatch
) -> None:
    """Each new file has the size and the time of the one that it replaces: only the inode, or the
    time of its change, tells them apart."""
    from fdbd.jobs.output import Output

    folder = make_folder(tiny / "flat", (), 40, 8)
    for file in folder.iterdir():
        Image.open(file).save(file.with_suffix(".bmp"))
        file.unlink()
    fit_tiny(result)
    monkeypatch.setattr("fdbd.jobs.scoring.PART_ROWS", 8)
    others = make_folder(tiny / "others", (), 40, 8, seed=9)
    write = Output.write
    replaced = []

    def write_and_replace(output: Output, number: int, tables: object) -> None:
        write(output, number, tables)
        if number == 0:
            for file in sorted(folder.iterdir())[20:]:
                before = file.stat()
                new = others / file.name
                Image.open(others / f"{file.stem}.png").save(new)
                os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
                assert new.stat().st_size == before.st_size
                os.replace(new, file)
                replaced.append(file.name)

    monkeypatch.setattr(Output, "write", write_and_replace)
    arguments = [
        "score",
        "guard.safetensors",
        "flat",
        "--model",
        "tinyfactory:tiny",
        "--workers",
        1,
    ]
    result(*arguments, "--batch-size", 4)
    rows = {row["path"]: row for row in pq.read_table("scores.parquet").to_pylist()}
    changed = {name for name, row in rows.items() if "changed or replaced" in (row["error"] or "")}
    assert changed
    # What was decoded ahead, before the files were replaced, is scored as it was.
    assert changed <= set(replaced)
    assert {replaced[-1], replaced[-2]} <= changed
    monkeypatch.setattr(Output, "write", write)
    result(*arguments, "--out", "again.parquet")
    assert pq.read_table("again.parquet")["error"].null_count == 40
