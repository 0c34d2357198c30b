"""Files from strangers: each ends in a clear error of one sentence or in a correct result, and none
runs code."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import fdbd
from fdbd import cli
from fdbd.bench.config import Config
from fdbd.core import artifact
from fdbd.core.pixels import decode
from fdbd.networks.checkpoint import load_plain, read_weights
from fdbd.util.archive import extract

# A hang is a failure.
pytestmark = pytest.mark.timeout(240)
few = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def settled(action: Callable[[], Any], name: str = "") -> Any:
    """What the action returns, or None where it ends in a clear error: one line, that names the
    file."""
    try:
        return action()
    except (ValueError, OSError) as error:
        message = str(error).strip()
    assert message
    assert "\n" not in message, message
    assert len(message) < 2000, message[:3000]
    assert name in message, message
    return None


@st.composite
def mutations(draw: Any, original: bytes) -> bytes:
    """The bytes with a few of them overwritten, cut out, put in or cut off."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "overwrite", "insert", "delete", "cut"]))
        if kind == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "overwrite":
            junk = draw(st.binary(min_size=1, max_size=8))
            data[place : place + len(junk)] = junk
        elif kind == "insert":
            data[place:place] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "delete":
            del data[place : place + draw(st.integers(1, 16))]
        else:
            del data[place:]
    return bytes(data)


class RunsCode:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self.trace), "w")


# ── guards and monitors
# ────────────────────────────────────────────────────────────────────────────────────────────

PROBE = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))


def make_guard(name: str = "react+fdbd") -> fdbd.Guard:
    generator = torch.Generator().manual_seed(0)
    head = fdbd.Head(torch.randn(3, 6, generator=generator), torch.zeros(3))
    features = torch.randn(80, 6, generator=generator)
    guard = fdbd.Guard(head, name).fit(
        [fdbd.Batch(features, None, torch.arange(80) % 3)], progress=False
    )
    return guard.calibrate([fdbd.Batch(torch.randn(40, 6, generator=generator))], progress=False)


@pytest.fixture(scope="module")
def guard_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("guard") / "guard.safetensors"
    make_guard().save(path)
    return path.read_bytes()


def decisions(guard: fdbd.Guard) -> list[torch.Tensor]:
    return list(guard.decide(fdbd.Batch(PROBE)))


@few
@given(data=st.data())
def test_a_mutated_guard_is_refused_or_decides_as_before(
    data: Any, guard_bytes: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "mutated.safetensors"
    path.write_bytes(data.draw(mutations(guard_bytes)))
    guard = settled(lambda: fdbd.load(path), path.name)
    if guard is not None:
        for found, expected in zip(decisions(guard), decisions(make_guard())):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to every value inside JSON values."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    ways = [path]
    for key, inner in items:
        ways += leaves(inner, (*path, key))
    return ways


def changed(draw: Any, value: Any, by: Any) -> Any:
    """JSON values with one of them replaced or left out."""
    value = json.loads(json.dumps(value))
    *way, last = draw(st.sampled_from([way for way in leaves(value) if way]))
    place = value
    for key in way:
        place = place[key]
    if isinstance(place, dict) and draw(st.booleans()):
        del place[last]
    else:
        place[last] = draw(by)
    return value


@few
@given(data=st.data())
def test_any_edit_of_the_safetensors_header_is_refused_or_changes_nothing(
    data: Any, guard_bytes: bytes, tmp_path: Path
) -> None:
    (size,) = struct.unpack("<Q", guard_bytes[:8])
    header = json.loads(guard_bytes[8 : 8 + size])
    edits = (
        st.sampled_from(
            ["F16", "F64", "U8", "I64", "BOOL", [2**62], [-1], [0], [2**40, 2**40], 2**63]
        )
        | json_values
    )
    text = json.dumps(changed(data.draw, header, edits)).encode()
    path = tmp_path / "edited.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + guard_bytes[8 + size :])
    guard = settled(lambda: fdbd.load(path), path.name)
    if guard is not None:
        for found, expected in zip(decisions(guard), decisions(make_guard())):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**40, 2**63, 2**64 - 1])
def test_a_declared_header_of_any_size_is_refused(
    size: int, guard_bytes: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", size) + guard_bytes[8:])
    with pytest.raises(artifact.ArtifactError, match=r"huge\.safetensors"):
        fdbd.load(path)


def test_a_number_of_many_digits_in_a_guard_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "digits.safetensors"
    save_file({}, path, {"fdbd": '{"format": 1' + "0" * 5000 + "}", "sha256": "0"})
    with pytest.raises(artifact.ArtifactError, match=r"digits\.safetensors"):
        fdbd.load(path)


strange_tensors = st.sampled_from(
    [
        torch.tensor(float("nan")),
        torch.full((3, 6), float("nan")),
        torch.full((40,), float("nan")),
        torch.full((6,), float("inf")),
        torch.zeros(0),
        torch.zeros(3, 6, dtype=torch.int64),
        torch.zeros(3, 6, dtype=torch.float16),
        torch.zeros(3, 6, dtype=torch.complex64),
        torch.zeros(6, dtype=torch.bool),
        torch.zeros(1, 1, 1, 1),
        torch.arange(41),
        -torch.arange(41),
    ]
)


@few
@given(data=st.data(), name=st.sampled_from(["react+fdbd", "knn", "vim", "odin"]))
def test_a_forged_guard_with_a_right_checksum_is_refused_or_works(
    data: Any, name: str, tmp_path: Path
) -> None:
    """The checksum guards against damage, not against people: they can compute it too."""
    path = tmp_path / "forged.safetensors"
    original = GUARDS[name]
    description = json.loads(json.dumps(original[0]))
    tensors = dict(original[1])
    if data.draw(st.booleans()):
        description = changed(data.draw, description, json_values)
    else:
        tensors[data.draw(st.sampled_from(sorted(tensors)))] = data.draw(strange_tensors)
    assume(isinstance(description, dict))
    artifact.write(path, description, tensors)
    guard = settled(lambda: fdbd.load(path), path.name)
    if guard is not None and guard.threshold is not None and not guard.detector.needs.network:
        found = settled(lambda: guard.decide(fdbd.Batch(PROBE)))
        if found is not None:
            assert found.is_ood.shape == (8,)
            # Nothing unknown is accepted.
            assert found.is_ood[~torch.isfinite(found.scores)].all()
        settled(lambda: guard.calibrate([fdbd.Batch(PROBE.repeat(5, 1))], progress=False))


def _parts_of(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "guard.safetensors")
        if name == "odin":
            model = torch.nn.Linear(6, 3)
            guard = fdbd.Guard(model, name).fit([PROBE]).calibrate([PROBE + 1], progress=False)
        else:
            guard = make_guard(name)
        guard.save(path)
        return artifact.read(path)


GUARDS = {name: _parts_of(name) for name in ("react+fdbd", "knn", "vim", "odin")}


@pytest.mark.parametrize(
    "fields",
    [{"size": 9000}, {"size": 8, "resize": 10**6}, {"size": 1e200}, {"size": float("nan")}],
)
def test_a_guard_cannot_ask_for_images_beyond_the_limit(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    from fdbd.decision.guard_file import open_guard

    description, tensors = GUARDS["react+fdbd"]
    path = tmp_path / "huge.safetensors"
    artifact.write(
        path,
        {**description, "about": {"model": {"name": "cifar10-ce"}, "preprocess": fields}},
        tensors,
    )
    with pytest.raises(artifact.ArtifactError, match=r"huge.safetensors.*pixel"):
        open_guard(path)


def test_a_threshold_of_nan_is_refused(tmp_path: Path) -> None:
    description, tensors = GUARDS["react+fdbd"]
    calibration = tensors["threshold.calibration"].clone()
    calibration[0] = float("nan")
    artifact.write(
        tmp_path / "nan.safetensors", description, {**tensors, "threshold.calibration": calibration}
    )
    with pytest.raises(artifact.ArtifactError, match="finite"):
        fdbd.load(tmp_path / "nan.safetensors")


@few
@given(data=st.data(), forge=st.booleans())
def test_a_mutated_monitor_is_refused_or_goes_on_as_before(
    data: Any, forge: bool, tmp_path: Path
) -> None:
    guard = make_guard()
    monitor = fdbd.Monitor(guard, window=5, horizon=50)
    monitor(fdbd.Batch(PROBE))
    # The same bytes in every run.
    monitor.beginnings[0]["time"] = 0.0
    path = tmp_path / "monitor.safetensors"
    monitor.save(path)
    if forge:
        description, tensors = artifact.read(path)
        artifact.write(path, changed(data.draw, description, json_values), tensors)
    else:
        path.write_bytes(data.draw(mutations(path.read_bytes())))
    restored = settled(lambda: fdbd.Monitor.load(path, guard), path.name)
    if restored is not None:
        again = restored.update(guard.score(fdbd.Batch(PROBE)))
        assert np.isfinite(again["log_martingale"])
        if not forge:
            assert again == monitor.update(guard.score(fdbd.Batch(PROBE)))


# ── images
# ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def encoded(file_format: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    file = io.BytesIO()
    options = (
        {"save_all": True, "append_images": [image.new("RGB", (13, 9))]}
        if file_format == "GIF"
        else {}
    )
    image.fromarray(pixels).save(file, file_format, **options)
    return file.getvalue()


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
def test_a_mutated_image_is_refused_or_is_an_image(file_format: str) -> None:
    original = encoded(file_format)

    @settings(max_examples=80)
    @given(data=st.data())
    def mutate(data: Any) -> None:
        image = data.draw(mutations(original))
        pixels = settled(lambda: decode(image, name="it.img", max_pixels=10_000), "it.img ")
        if pixels is not None:
            assert pixels.dtype == np.uint8
            assert pixels.ndim == 3
            assert pixels.shape[2] == 3
            assert 0 < pixels.shape[0] * pixels.shape[1] <= 10_000

    mutate()


# ── checkpoints
# ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("how", ["torch", "legacy", "pickle", "state_dict"])
def test_a_pickle_that_runs_code_is_refused_and_not_run(
    name: str, how: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / name
    hostile: Any = {"state_dict": {"weight": torch.zeros(2)}, "extra": RunsCode(trace)}
    if how == "state_dict":
        hostile = {"weight": RunsCode(trace)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, path, _use_new_zipfile_serialization=how != "legacy")
    for load in (read_weights, load_plain):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    assert not trace.exists()


@few
@given(data=st.data(), form=st.sampled_from(["zip", "legacy", "safetensors"]))
def test_a_mutated_checkpoint_is_refused_or_holds_tensors(
    data: Any, form: str, tmp_path: Path
) -> None:
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    state = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    path.write_bytes(data.draw(mutations(path.read_bytes())))
    found = settled(lambda: read_weights(path), path.name)
    if found is not None:
        assert all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in found.items()
        )
    settled(lambda: load_plain(path), path.name)


# ── configs
# ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "a.b." * 3000 + "c = 1", "model = 1e999"]
)
def test_toml_of_strangers_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    assert settled(lambda: Config.from_file(path), path.name) is None


@few
@given(
    content=st.binary(max_size=60)
    | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace"))
)
@example(content=b"\xff\xfe")
def test_a_config_of_any_bytes_is_refused_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    assert settled(lambda: Config.from_file(path), path.name) is None


@pytest.mark.parametrize(
    "text",
    [
        'model = "trap:spring"',
        'model = "x.pt2"',
        'model = "cifar10-ce"\ndetectors = ["trap:Detector"]',
    ],
)
def test_a_config_runs_no_code_unasked(text: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trap.py").write_text("open('TRACE', 'w').close()\n")
    (tmp_path / "x.pt2").write_bytes(b"")
    path = tmp_path / "config.toml"
    path.write_text(f'id = "cifar10"\nood = ["mnist"]\n{text}\n')
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", str(path)])
    assert left.value.code == 2
    assert not (tmp_path / "TRACE").exists()


# ── archives
# ───────────────────────────────────────────────────────────────────────────────────────────────────────


def zipped(names: list[str], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), b"content" * 10)
    return file.getvalue()


def tarred(names: list[str], mode: str = "w:gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 70
            archive.addfile(info, io.BytesIO(b"content" * 10))
    return file.getvalue()


def assert_nothing_outside(folder: Path, allowed: set[str]) -> None:
    assert {entry.name for entry in folder.iterdir()} <= allowed
    target = folder / "target"
    # Of a folder that does not exist, rglob finds nothing.
    for entry in target.rglob("*"):
        assert not entry.is_symlink()
        assert target in entry.resolve().parents


path_pieces = st.lists(
    st.sampled_from(
        ["..", ".", "", "a", "b.png", "~", "C:", "\\", "..\\..", "/", "con", "a\nb", "é", "\u202e"]
    ),
    min_size=1,
    max_size=5,
).map("/".join)


@few
@given(names=st.lists(path_pieces, min_size=1, max_size=3, unique=True), is_zip=st.booleans())
def test_no_name_in_an_archive_leads_outside(
    names: list[str], is_zip: bool, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("names")
    archive = folder / "archive"
    archive.write_bytes(zipped(names) if is_zip else tarred(names))
    settled(lambda: extract(archive, folder / "target"))
    assert_nothing_outside(folder, {"archive", "target"})


@few
@given(data=st.data(), kind=st.sampled_from(["zip", "w:gz", "w:bz2", "w:xz", "w:"]))
def test_a_mutated_archive_is_refused_or_unpacked_inside(
    data: Any, kind: str, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    archive = folder / "archive"
    names = ["a/one.png", "a/two.png"]
    archive.write_bytes(
        data.draw(mutations(zipped(names) if kind == "zip" else tarred(names, kind)))
    )
    settled(lambda: extract(archive, folder / "target", max_bytes=10_000), archive.name)
    assert_nothing_outside(folder, {"archive", "target"})


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_devices_in_archives_are_refused(kind: bytes, tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    (tmp_path / "archive").write_bytes(file.getvalue())
    with pytest.raises(ValueError, match="link or device"):
        extract(tmp_path / "archive", tmp_path / "target")
    assert_nothing_outside(tmp_path, {"archive"})


# ── features, ONNX
# ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_features(path: Path) -> list[Any]:
    from fdbd.data.features import Widths, holds_features, open_features

    if not holds_features(str(path)):
        raise ValueError(f"{path} holds no features")
    rows = open_features(path)
    widths = Widths(6, 3)
    rows.check(widths, labels=True)
    return [batch for span in rows.spans(4) for batch in rows.read(span, widths, labels=True)]


def test_pickled_arrays_in_an_npz_are_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    np.savez(path, features=np.array([[RunsCode(tmp_path / "trace")]], dtype=object))
    with pytest.raises(ValueError, match=r"features\.npz"):
        read_features(path)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "shape", ["(10, 6)", "(10**12, 6)", "(-1, 6)", "(10, 10**18)", "(10, 0)", "'x'", "()"]
)
def test_an_npz_header_that_claims_another_size_is_refused(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    header = (
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117)
        + b"\n"
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "features.npy",
            b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(48),
        )
    assert settled(lambda: read_features(path), path.name) is None


def test_an_npz_header_that_is_no_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    for text in (b"{'descr': (((", b"{[]: 1}", b"  1\n 2", b"(" * 3000):
        header = text.ljust(117) + b"\n"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(
                "features.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
            )
        with pytest.raises(ValueError, match="not a readable NPZ file"):
            read_features(path)


@pytest.mark.parametrize("prefix", ["", "npz:"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_npz_is_stored_or_deflated(prefix: str, compression: int, tmp_path: Path) -> None:
    from fdbd.data.inputs import open_images

    path = tmp_path / "images.npz"
    array = io.BytesIO()
    np.save(array, np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), np.uint8))
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("x.npy", array.getvalue())
    with pytest.raises((ValueError, RuntimeError), match="expected stored or deflated members"):
        open_images(f"{prefix}{path}")


OPEN_WITH_LITTLE_MEMORY = """
import resource, sys
from fdbd.data.npz import NpzArray
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    NpzArray(sys.argv[1], "features")
except ValueError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


@pytest.mark.parametrize("bomb", ["bzip2", "header"])
def test_a_small_npz_takes_little_memory_before_it_is_refused(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    long_header = b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 29) + b" " * (1 << 29)
    compression = zipfile.ZIP_BZIP2 if bomb == "bzip2" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("features.npy", long_header)
    assert path.stat().st_size < 1 << 20
    command = [sys.executable, "-c", OPEN_WITH_LITTLE_MEMORY, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    message, kilobytes = result.stdout.splitlines()
    assert path.name in message
    assert int(kilobytes) < 50_000


def test_a_zip_archive_of_another_compression_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("a.png", bytes(1000))
    with pytest.raises(ValueError, match="expected stored or deflated members"):
        extract(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sizes_in_an_npz_of_images_have_limits(tmp_path: Path, monkeypatch: Any) -> None:
    from fdbd.data import npz
    from fdbd.data.inputs import open_images

    path = tmp_path / "images.npz"
    np.savez_compressed(path, x=np.zeros((1, 8001, 8000, 3), np.uint8))
    with pytest.raises(ValueError, match=r"8000 × 8001 pixels, more than the limit of 64,000,000"):
        open_images(str(path))
    np.savez_compressed(path, x=np.zeros((100, 1, 1, 3), np.uint8), y=np.zeros(100, np.int64))
    assert len(open_images(str(path))) == 100
    monkeypatch.setattr(npz, "MAX_WHOLE_BYTES", 799)
    with pytest.raises(ValueError, match="'y' has 800 bytes, more than the limit of 799"):
        open_images(str(path))


def test_a_zip_that_claims_more_than_its_bytes_can_stand_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (40_000_000, 6)}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("features.npy", header.getvalue() + bytes(48))
        file.getinfo("features.npy").file_size = len(header.getvalue()) + 40_000_000 * 24
    with pytest.raises(ValueError, match="not what its header says"):
        read_features(path)


@few
@given(data=st.data(), form=st.sampled_from(["npz", "deflated.npz", "parquet"]))
def test_mutated_features_are_refused_or_read_as_rows(data: Any, form: str, tmp_path: Path) -> None:
    path = tmp_path / f"features.{form}"
    features = PROBE.numpy()
    if form == "parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        column = pa.FixedSizeListArray.from_arrays(features.ravel(), 6)
        parquet.write_table(
            pa.table({"features": column, "label": np.arange(8)}), path, row_group_size=4
        )
    else:
        save = np.savez if form == "npz" else np.savez_compressed
        save(path, features=features, label=np.arange(8))
    path.write_bytes(data.draw(mutations(path.read_bytes())))
    batches = settled(lambda: read_features(path), path.name)
    if batches is not None:
        for batch in batches:
            assert len(batch.inputs.features) + len(batch.errors) == len(batch.names)


def test_a_mutated_onnx_file_is_refused_or_describes_itself(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from fdbd.export.onnx import metadata

    graph = onnx.helper.make_graph([], "g", [], [])
    model = onnx.helper.make_model(graph)
    onnx.helper.set_model_props(
        model, {"fdbd.version": '"0.1.0"', "fdbd.class_names": '["a", "b"]'}
    )
    original = model.SerializeToString()
    path = tmp_path / "guard.onnx"

    @settings(max_examples=80)
    @given(data=st.data())
    def mutate(data: Any) -> None:
        path.write_bytes(data.draw(mutations(original)))
        found = settled(lambda: metadata(path), path.name)
        assert found is None or "version" in found

    mutate()
    path.write_bytes(os.urandom(64))
    assert settled(lambda: metadata(path), path.name) is None
