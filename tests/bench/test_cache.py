"""The feature cache: one pass ever, whatever is killed, damaged, run twice or undecodable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fdbd.bench.cache import CachedFeatures, FeatureCache, model_key
from fdbd.core.batch import Batch, Head
from fdbd.data.datasets import Images, Preprocess, from_folder
from fdbd.data.decoding import prefetch
from fdbd.util import files

SHARD_ROWS = 16
PREPROCESS = Preprocess(8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


class Network:
    """The smallest thing the cache takes for a classifier; counts the images that pass, and can be
    slow."""

    def __init__(self, seed: int = 0, log: Path | None = None, delay: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 4))
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        self.log, self.delay = log, delay
        self.num_images = 0

    @property
    def head(self) -> Head:
        return Head.from_linear(self.model[3])

    def __call__(self, inputs: Tensor) -> Batch:
        assert torch.is_inference_mode_enabled()
        self.num_images += len(inputs)
        time.sleep(self.delay)
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{len(inputs)}\n")
        features = self.model[:3](inputs)
        return Batch(features, self.model[3](features))


def pictures(count: int = 100, seed: int = 0) -> Images:
    rng = np.random.default_rng(seed)
    return Images(
        rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8),
        rng.integers(0, 4, count),
        name="pictures",
    )


def direct(images: Images, network: Network) -> Tensor:
    with torch.no_grad():
        return network.model[:3](PREPROCESS(np.asarray(images.images)))


def extract_slowly(root: str, log: str) -> None:
    """What the processes below run."""
    FeatureCache(root, shard_rows=SHARD_ROWS).features(
        Network(log=Path(log), delay=0.15), pictures(), PREPROCESS, batch_size=8
    )


def start_extraction(root: Path, log: Path) -> subprocess.Popen[bytes]:
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['extract_slowly'](*sys.argv[2:])"
    process = subprocess.Popen([sys.executable, "-c", code, __file__, str(root), str(log)])
    deadline = time.time() + 300
    # Two shards of two batches are done, the third is under way.
    while num_passes(log) < 5:
        assert process.poll() is None, "the extraction ended early"
        assert time.time() < deadline
        time.sleep(0.02)
    return process


def num_passes(log: Path) -> int:
    return len(log.read_text().split()) if log.exists() else 0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "home"))


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "features", shard_rows=SHARD_ROWS)


def entry_files(cache: FeatureCache, pattern: str) -> list[Path]:
    (entry,) = cache.list()
    return sorted(entry.path.glob(pattern))


def flip_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 255
    path.write_bytes(content)


def check(found: CachedFeatures, images: Images, network: Network) -> None:
    expected = direct(images, network)
    torch.testing.assert_close(found.features.float(), expected, rtol=1e-5, atol=1e-6)
    assert images.labels is not None
    assert found.labels is not None
    assert found.labels.tolist() == images.labels.tolist()
    assert found.positions.tolist() == list(range(len(images)))


# What it gives.


def test_features_and_labels_are_the_networks(cache: FeatureCache) -> None:
    network = Network()
    images = pictures()
    found = cache.features(network, images, PREPROCESS, batch_size=7)
    check(found, images, network)
    assert found.num_computed == network.num_images == 100
    assert found.failures == ()
    batches = list(found.batches(30))
    assert [len(batch.features) for batch in batches] == [30, 30, 30, 10]
    assert torch.equal(torch.cat([batch.features for batch in batches]), found.features)
    labels = [batch.labels for batch in batches if batch.labels is not None]
    assert images.labels is not None
    assert torch.cat(labels).tolist() == images.labels.tolist()


def test_the_second_time_nothing_is_computed(cache: FeatureCache) -> None:
    first = cache.features(Network(), pictures(), PREPROCESS)
    network = Network()
    second = cache.features(network, pictures(), PREPROCESS, batch_size=3)
    assert network.num_images == second.num_computed == 0
    assert torch.equal(first.features, second.features)


def test_features_are_memory_mapped_and_the_file_is_safe_from_writes(cache: FeatureCache) -> None:
    found = cache.features(Network(), pictures(), PREPROCESS)
    (path,) = entry_files(cache, "features-*.npy")
    if Path("/proc/self/maps").exists():
        assert str(path) in Path("/proc/self/maps").read_text()
    before = path.read_bytes()
    found.features.add_(1)
    del found
    assert path.read_bytes() == before


def test_the_key_is_the_content_of_weights_data_and_preprocessing(cache: FeatureCache) -> None:
    cache.features(Network(), pictures(), PREPROCESS)

    def computes(network: Network, images: Images, preprocess: Preprocess) -> bool:
        return cache.features(network, images, preprocess).num_computed > 0

    renamed = pictures()
    renamed.name = "another name"
    assert not computes(Network(), renamed, PREPROCESS)
    unlabelled = Images(pictures().images)
    assert not computes(Network(), unlabelled, PREPROCESS)
    assert computes(Network(seed=1), pictures(), PREPROCESS)
    assert computes(Network(), pictures(seed=1), PREPROCESS)
    assert computes(Network(), pictures().limited(50), PREPROCESS)
    assert computes(Network(), pictures(), Preprocess(8))
    assert len(cache.list()) == 5


def test_the_models_key_sees_weights_buffers_and_settings() -> None:
    keys = {model_key(Network())}
    changed = Network()
    changed.model[1].bias.data[3] += 1e-6
    keys.add(model_key(changed))
    buffered = Network()
    buffered.model.register_buffer("scale", torch.tensor(2, dtype=torch.bfloat16), persistent=False)
    keys.add(model_key(buffered))
    other_activation = Network()
    other_activation.model[2] = nn.Tanh()
    keys.add(model_key(other_activation))
    assert len(keys) == 4
    assert model_key(Network()) in keys


def test_a_real_classifier_brings_its_layers(cache: FeatureCache) -> None:
    from fdbd.networks.classifier import Classifier

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4)
    )
    classifier = Classifier(model, layers=["0"])
    images = pictures(40)
    found = cache.features(classifier, images, PREPROCESS)
    with torch.no_grad():
        expected = classifier(PREPROCESS(np.asarray(images.images)))
    torch.testing.assert_close(found.features, expected.features)
    assert found.layers is not None
    torch.testing.assert_close(found.layers["0"], expected.layers["0"])
    assert next(found.batches(7)).layers["0"].shape == (7, 5)  # type: ignore[index]
    # Other layers, other entry.
    assert cache.features(Classifier(model), images, PREPROCESS).num_computed == 40


def test_progress_counts_to_the_end(cache: FeatureCache) -> None:
    seen: list[tuple[int, int]] = []
    cache.features(
        Network(), pictures(), PREPROCESS, batch_size=8, progress=lambda *args: seen.append(args)
    )
    assert seen[:2] == [(0, 100), (8, 100)]
    assert seen[-1] == (100, 100)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    cache.features(Network(), pictures(), PREPROCESS, progress=lambda *args: seen.append(args))
    # Nothing is left to do.
    assert seen == [(100, 100)]


# Killed, interrupted, twice at once.


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this platform")
def test_a_killed_extraction_resumes_and_repeats_no_finished_shard(
    cache: FeatureCache, tmp_path: Path
) -> None:
    process = start_extraction(cache.root, tmp_path / "log")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (entry,) = cache.list()
    assert not entry.is_complete
    done = entry.rows_done
    assert 2 * SHARD_ROWS <= done < 100
    # As a kill may leave it.
    (entry.path / ".0badcafe.manifest.json").write_bytes(b'{"arrays"')
    network = Network()
    images = pictures()
    found = cache.features(network, images, PREPROCESS, batch_size=8)
    assert network.num_images == found.num_computed == 100 - done
    check(found, images, network)
    uninterrupted = FeatureCache(tmp_path / "other", shard_rows=SHARD_ROWS).features(
        Network(), images, PREPROCESS, batch_size=8
    )
    assert torch.equal(found.features, uninterrupted.features)
    assert [path for path in entry.path.iterdir() if path.name.startswith(".")] == []


def test_two_runs_at_once_share_one_pass(cache: FeatureCache, tmp_path: Path) -> None:
    process = start_extraction(cache.root, tmp_path / "log")
    network = Network()
    images = pictures()
    # Waits for the other.
    found = cache.features(network, images, PREPROCESS, batch_size=8)
    assert process.wait() == 0
    assert network.num_images == 0
    # 6 shards of 16 and one of 4, in batches of 8.
    assert num_passes(tmp_path / "log") == 13
    check(found, images, network)


@pytest.mark.slow
def test_two_runs_without_locks_do_no_harm(
    cache: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start_extraction(cache.root, tmp_path / "log")

    def no_locks(*_: object, **__: object) -> None:
        raise NotImplementedError("this file system has none")

    monkeypatch.setattr(files.FileLock, "acquire", no_locks)
    network = Network(delay=0.05)
    images = pictures()
    found = cache.features(network, images, PREPROCESS, batch_size=8)
    assert 0 < network.num_images <= 100 - 2 * SHARD_ROWS
    check(found, images, network)
    # It may have failed over files that were taken from under it; what is there must be right.
    process.wait()
    check(cache.features(Network(), images, PREPROCESS, batch_size=8), images, network)


def test_a_disk_that_loses_what_is_written_is_an_error(
    cache: FeatureCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(descriptor: int) -> None:
        os.pwrite(descriptor, bytes(64), os.fstat(descriptor).st_size - 64)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lose)
        with pytest.raises(OSError, match="loses what is written to it: check the disk"):
            cache.features(Network(), pictures(), PREPROCESS)
    network = Network()
    images = pictures()
    check(cache.features(network, images, PREPROCESS), images, network)
    assert network.num_images > 0


def test_ctrl_c_leaves_what_was_finished(cache: FeatureCache) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.features(Network(), pictures(), PREPROCESS, batch_size=8, progress=interrupt)
    assert cache.list()[0].rows_done == 32
    network = Network()
    images = pictures()
    found = cache.features(network, images, PREPROCESS, batch_size=8)
    assert network.num_images == 68
    check(found, images, network)


def test_a_network_that_fails_is_reported_as_it_failed(cache: FeatureCache) -> None:
    class Broken(Network):
        def __call__(self, inputs: Tensor) -> Batch:
            raise RuntimeError("out of memory, say")

    with pytest.raises(RuntimeError, match="out of memory, say"):
        cache.features(Broken(), pictures(), PREPROCESS)


def test_features_of_the_wrong_shape_are_refused(cache: FeatureCache) -> None:
    class Wrong(Network):
        def __call__(self, inputs: Tensor) -> Batch:
            return Batch(inputs)

    with pytest.raises(
        ValueError, match=r"gives features \(16, 3, 8, 8\) for 16 images, expected \(N, P\)"
    ):
        cache.features(Wrong(), pictures(), PREPROCESS)


# Damaged.


def test_a_damaged_part_is_found_by_verify_and_only_it_is_computed_again(
    cache: FeatureCache,
) -> None:
    images = pictures()
    before = cache.features(Network(), images, PREPROCESS, batch_size=8).features.clone()
    assert cache.verify() == ()
    (path,) = entry_files(cache, "features-*.npy")
    # In the last but one whole shard.
    flip_byte(path, path.stat().st_size - 4 * SHARD_ROWS * 6 * 2)
    (problem,) = cache.verify()
    assert problem.key == cache.list()[0].key
    assert problem.shard == 4
    assert "checksum is wrong" in problem.reason
    assert not cache.list()[0].is_complete
    # It is struck off already.
    assert cache.verify() == ()
    network = Network()
    found = cache.features(network, images, PREPROCESS, batch_size=8)
    assert network.num_images == SHARD_ROWS
    assert torch.equal(found.features, before)
    assert cache.list()[0].is_complete
    assert cache.verify() == ()


def test_a_damaged_part_is_found_without_verify_too(cache: FeatureCache) -> None:
    images = pictures()
    cache.features(Network(), images, PREPROCESS)
    (path,) = entry_files(cache, "features-*.npy")
    flip_byte(path, 200)
    network = Network()
    check(cache.features(network, images, PREPROCESS), images, network)
    assert network.num_images == SHARD_ROWS


def test_damaged_shards_of_an_unfinished_entry_are_computed_again(cache: FeatureCache) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.features(Network(), pictures(), PREPROCESS, batch_size=8, progress=interrupt)
    assert cache.list()[0].rows_done == 3 * SHARD_ROWS
    (path,) = entry_files(cache, "features-*.npy")
    for shard in (0, 1):
        # After the header of 128 bytes.
        flip_byte(path, 128 + 4 * 6 * SHARD_ROWS * shard)
    assert [problem.shard for problem in cache.verify()] == [0, 1]
    network = Network()
    images = pictures()
    check(cache.features(network, images, PREPROCESS, batch_size=8), images, network)
    assert network.num_images == 100 - SHARD_ROWS


@pytest.mark.parametrize("damage", ["manifest", "no array", "cut array", "short array", "about"])
def test_any_other_damage_is_survived(cache: FeatureCache, damage: str) -> None:
    images = pictures()
    cache.features(Network(), images, PREPROCESS)
    [array] = entry_files(cache, "features-*.npy")
    [manifest] = entry_files(cache, "manifest.json")
    [about] = entry_files(cache, "about.json")
    if damage == "manifest":
        manifest.write_text('{"arrays": ')
    elif damage == "no array":
        array.unlink()
    elif damage == "cut array":
        array.write_bytes(array.read_bytes()[:300])
    elif damage == "short array":
        # A valid file, with fewer rows than the manifest has.
        np.save(array, np.load(array)[:50])
    else:
        about.unlink()
    network = Network()
    check(cache.features(network, images, PREPROCESS), images, network)
    # The features are whole if only the description of the entry was lost.
    num_computed = 0 if damage == "about" else 100
    assert network.num_images == num_computed
    assert cache.list()[0].is_complete
    # Nothing is left behind.
    assert len(entry_files(cache, "*.npy")) == 1


# Files that are not images.


def write_folder(folder: Path, count: int = 20) -> Images:
    image = pytest.importorskip("PIL.Image")
    for number in range(count):
        (folder / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(
            0, 256, (8 + number % 3, 9, 3), dtype=np.uint8
        )
        image.fromarray(pixels).save(folder / f"{number % 2}" / f"{number:02d}.png")
    return from_folder(folder)


def test_folders_are_decoded_and_preprocessed(cache: FeatureCache, tmp_path: Path) -> None:
    images = write_folder(tmp_path / "set")
    network = Network()
    found = cache.features(network, images, PREPROCESS, batch_size=6)
    with torch.no_grad():
        expected = network.model[:3](PREPROCESS(images.images))
    torch.testing.assert_close(found.features, expected)
    assert found.labels is not None
    assert found.labels.tolist() == [0] * 10 + [1] * 10


def test_an_undecodable_image_is_reported_counted_and_left_out(
    cache: FeatureCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = cache.features(Network(), write_folder(tmp_path / "set"), PREPROCESS)
    bad = tmp_path / "set" / "1" / "07.png"
    bad.write_bytes(b"this was a picture once")
    images = from_folder(tmp_path / "set")
    # Computed, then from the cache.
    for expected_passes in (19, 0):
        network = Network()
        found = cache.features(network, images, PREPROCESS, batch_size=6)
        assert network.num_images == expected_passes
        (failure,) = found.failures
        assert failure.row == 13
        assert "1/07.png is not a readable image" in failure.reason
        assert len(found) == len(found.positions) == 19
        assert 13 not in found.positions.tolist()
        assert found.labels is not None
        assert found.labels.tolist() == [0] * 10 + [1] * 9
        torch.testing.assert_close(found.features, whole.features[found.positions])
        assert "1 of 20 images are left out" in caplog.text


def test_a_shard_with_no_good_image_does_not_stop_the_others(
    cache: FeatureCache, tmp_path: Path
) -> None:
    write_folder(tmp_path / "set", 40)
    for number in range(0, 40, 2):
        # Rows 0 to 19: all of the first shard.
        (tmp_path / "set" / "0" / f"{number:02d}.png").write_bytes(b"")
    found = cache.features(Network(), from_folder(tmp_path / "set"), PREPROCESS)
    assert len(found.failures) == 20
    assert found.features.shape == (20, 6)


def test_a_damaged_shard_that_decodes_otherwise_now_is_written_anew_with_those_behind_it(
    cache: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "set", 40)

    def run_out_of_memory(self: Preprocess, pixels: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Preprocess, "fit", run_out_of_memory)
        with pytest.raises(ValueError, match="none of the 40"):
            cache.features(Network(), from_folder(tmp_path / "set"), PREPROCESS)
    (manifest,) = entry_files(cache, "manifest.json")
    values = json.loads(manifest.read_text())
    values["shards"][1]["sha256"] = None
    manifest.write_text(json.dumps(values))
    with pytest.raises(OSError, match="run the command again"):
        cache.features(Network(), from_folder(tmp_path / "set"), PREPROCESS)
    found = cache.features(Network(), from_folder(tmp_path / "set"), PREPROCESS)
    assert found.positions.tolist() == list(range(SHARD_ROWS, 40))


def test_a_folder_without_one_good_image_is_an_error(cache: FeatureCache, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jpg").write_bytes(b"no")
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the 1 images of set can be decoded"):
            cache.features(Network(), from_folder(tmp_path / "set"), PREPROCESS)


def test_grey_and_cmyk_images_pass_like_any_other(cache: FeatureCache, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("L", (8, 8), 128).save(tmp_path / "grey.png")
    image.new("RGB", (8, 8), (128, 128, 128)).save(tmp_path / "rgb.png")
    image.new("CMYK", (8, 8), (0, 0, 0, 127)).save(tmp_path / "cmyk.jpg", quality=100)
    found = cache.features(Network(), from_folder(tmp_path), PREPROCESS)
    assert found.failures == ()
    cmyk, grey, rgb = found.features
    torch.testing.assert_close(grey, rgb)
    torch.testing.assert_close(cmyk, rgb, rtol=0.05, atol=0.05)


# Options and housekeeping.


def test_bad_options_are_refused(cache: FeatureCache) -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        cache.features(Network(), pictures(), PREPROCESS, batch_size=0)
    with pytest.raises(ValueError, match="holds no image"):
        cache.features(Network(), Images(np.empty((0, 8, 8, 3), np.uint8)), PREPROCESS)
    with pytest.raises(ValueError, match="shard_rows is 0"):
        FeatureCache(shard_rows=0)


def test_entries_are_listed_and_cleared(cache: FeatureCache) -> None:
    assert cache.list() == ()
    assert cache.clear() == 0
    cache.features(Network(), pictures(), PREPROCESS)
    cache.features(Network(), pictures(50, seed=1), PREPROCESS)
    entries = {entry.rows: entry for entry in cache.list()}
    assert set(entries) == {50, 100}
    assert entries[100].dataset == "pictures"
    assert entries[100].model.startswith("Sequential ")
    assert entries[100].num_bytes > 100 * 6 * 4
    assert cache.clear([entries[50].key]) == entries[50].num_bytes
    assert [entry.rows for entry in cache.list()] == [100]
    assert cache.clear() > 0
    assert cache.list() == ()


def test_an_entry_in_use_is_neither_cleared_nor_verified(cache: FeatureCache) -> None:
    cache.features(Network(), pictures(), PREPROCESS)
    (entry,) = cache.list()
    (array,) = entry_files(cache, "features-*.npy")
    flip_byte(array, 300)
    with files.lock(cache._lock_path(entry.key)):
        assert cache.clear() == 0
        assert cache.verify() == ()
    assert len(cache.verify()) == 1


def test_the_default_place_is_the_cache_folder(tmp_path: Path) -> None:
    assert FeatureCache().root == tmp_path / "home" / "features"


def test_prefetching_passes_errors_on_and_stops_when_closed() -> None:
    def numbers() -> Any:
        yield 1
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        list(prefetch(numbers(), 2))
    ends: list[int] = []

    def endless() -> Any:
        try:
            while True:
                yield 0
        finally:
            ends.append(1)

    items = prefetch(endless(), 2)
    next(items)
    items.close()
    assert ends == [1]
