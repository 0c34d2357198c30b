"""A guard on a real Ray cluster of several nodes gives the result of one machine, also when a node
dies."""

from __future__ import annotations

import contextlib
import doctest
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fdbd
from fdbd.core.preprocessing import Preprocess

ray = pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("ray.data")
Cluster = pytest.importorskip("ray.cluster_utils").Cluster

from fdbd.data.images import Images  # noqa: E402
from fdbd.decision.guard_file import OpenedGuard  # noqa: E402
from fdbd.jobs import ray as on_ray  # noqa: E402
from fdbd.jobs import scoring  # noqa: E402
from fdbd.jobs.ray import datasets, pool  # noqa: E402

# Workers cannot import this file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

NODE = {"num_cpus": 2, "object_store_memory": 150 * 2**20}
QUICK_DEATH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    # By default Ray takes seven minutes to miss a process that was stopped.
    "grpc_client_keepalive_time_ms": 10_000,
    "grpc_client_keepalive_timeout_ms": 5_000,
}


@pytest.fixture(scope="module")
def cluster():
    before = ray_processes()
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "include_dashboard": False, "_system_config": QUICK_DEATH},
    )
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    deadline = time.monotonic() + 60
    while (left := ray_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "processes of the cluster are left behind"


def ray_processes() -> set[str]:
    """Process ids of living raylets and their directories (Linux; elsewhere none are seen)."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, name, state = re.match(r"(\d+) \((.*)\) (\S)", status.read_text()).groups()
            if name in ("raylet", "gcs_server") and state != "Z":
                found.add(number)
    return found


SLOW = pytest.mark.slow
HEAD = fdbd.Head(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(4))


@pytest.mark.parametrize("module", [datasets, pool], ids=lambda module: module.__name__)
def test_the_examples_of_the_reference_run(cluster, module):
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 1
    assert not found.failed


def make_features(
    rows: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (rows,), generator=generator)
    return (torch.randn(rows, 6, generator=generator) + labels[:, None]).to(dtype), labels


def features_table(features: torch.Tensor, labels: torch.Tensor):
    column = pa.FixedSizeListArray.from_arrays(features.numpy().ravel(), features.shape[1])
    return pa.table({"id": np.arange(len(labels)), "features": column, "label": labels.numpy()})


def write_features(folder, features: torch.Tensor, labels: torch.Tensor, files: int) -> str:
    table = features_table(features, labels)
    for number, rows in enumerate(np.array_split(np.arange(len(labels)), files)):
        pq.write_table(table.take(rows), folder / f"part{number}.parquet", row_group_size=50)
    return str(folder)


def feature_guard(features: torch.Tensor) -> fdbd.Guard:
    calibration = make_features(200, features.dtype, seed=2)[0]
    return fdbd.Guard(HEAD, "fdbd").fit([fdbd.Batch(features)]).calibrate([fdbd.Batch(calibration)])


def assert_same_buffers(found: nn.Module, expected: nn.Module) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


# knn samples rows, react takes a percentile, vim needs two passes, mds labels.
NAMES = ["fdbd", fdbd.create("knn", alpha=0.5), "react+vim", "mds"]


@pytest.mark.parametrize(
    ("blocks", "dtype"),
    [
        (7, torch.float64),
        pytest.param(1, torch.float64, marks=SLOW),
        pytest.param(31, torch.float32, marks=SLOW),
    ],
)
def test_a_fit_on_blocks_has_the_buffers_of_a_local_fit(cluster, blocks, dtype):
    features, labels = make_features(301, dtype)
    dataset = (
        ray.data.from_arrow(features_table(features, labels)).repartition(blocks).materialize()
    )
    together, expected = fdbd.Ensemble(NAMES), fdbd.Ensemble(NAMES)
    on_ray.fit(together, dataset, head=HEAD)
    expected.fit(fdbd.Batch(features, None, labels), HEAD)
    assert_same_buffers(together, expected)


def test_auto_is_fitted_where_the_data_are_and_weighed_here(cluster):
    features, labels = make_features(400)
    fresh = make_features(200, seed=3)[0]
    dataset = ray.data.from_arrow(features_table(features, labels)).repartition(5).materialize()
    kinds = {"wide": fdbd.Batch(4 * torch.randn(60, 6))}
    auto = fdbd.Auto(pool=("fdbd", "energy", "knn"), kinds=kinds)
    with pytest.raises(ValueError, match="held_out"):
        on_ray.fit(fdbd.Guard(HEAD, auto), dataset)
    together = on_ray.fit(fdbd.Guard(HEAD, auto), dataset, held_out=[fdbd.Batch(fresh)])
    alone = fdbd.Guard(HEAD, auto).fit([fdbd.Batch(features)], held_out=[fdbd.Batch(fresh)])
    for found, expected in zip(together.choice.members, alone.choice.members):
        assert found.name == expected.name
        assert found.share == pytest.approx(expected.share, abs=1e-6)
    probe = fdbd.Batch(make_features(20, seed=4)[0])
    torch.testing.assert_close(together.score(probe), alone.score(probe))


def test_true_classes_come_from_y_if_label_is_a_prediction(cluster):
    features, labels = make_features(301, torch.float64)
    table = features_table(features, (labels + 1) % 4).append_column("y", pa.array(labels.numpy()))
    expected = fdbd.create("mds").fit(fdbd.Batch(features, None, labels), HEAD)
    assert_same_buffers(
        on_ray.fit(fdbd.create("mds"), ray.data.from_arrow(table), head=HEAD), expected
    )


@SLOW
@pytest.mark.parametrize(
    "name", [name for name in fdbd.list_detectors() if not fdbd.create(name).needs.network]
)
def test_every_detector_on_features_fits_alike(cluster, name):
    features, labels = make_features(301, torch.float64)
    dataset = ray.data.from_arrow(features_table(features, labels)).repartition(3).materialize()
    expected = fdbd.create(name).fit(fdbd.Batch(features, None, labels), HEAD)
    assert_same_buffers(on_ray.fit(fdbd.create(name), dataset, head=HEAD), expected)


def test_scores_of_parquet_rows_are_those_of_the_guard_and_each_row_comes_once(cluster, tmp_path):
    features, labels = make_features(1003)
    guard = feature_guard(features)
    dataset = ray.data.read_parquet(
        write_features(tmp_path, features, labels, 3), override_num_blocks=5
    )
    result = on_ray.score(
        guard, dataset, class_names="abcd", workers=on_ray.Workers(2, batch_size=64)
    )
    rows = result.to_pandas().sort_values("id")
    decision = guard.decide(fdbd.Batch(features))
    assert rows["id"].tolist() == list(range(1003))
    assert rows["label"].tolist() == decision.labels.tolist()
    assert rows["class"].tolist() == ["abcd"[label] for label in decision.labels]
    np.testing.assert_allclose(rows["score"], decision.scores, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rows["p_value"], decision.p_values, rtol=1e-6)
    assert rows["is_ood"].tolist() == decision.is_ood.tolist()
    assert rows["error"].isna().all()


def test_mistakes_are_answered_in_one_sentence(cluster):
    features, labels = make_features(20)
    guard = feature_guard(features)
    dataset = ray.data.from_arrow(features_table(features, labels))
    with pytest.raises(ValueError, match="no column 'pixels'; it has id, features, label"):
        on_ray.score(guard, dataset, column="pixels")
    with pytest.raises(ValueError, match="cannot keep 'name'"):
        on_ray.score(guard, dataset, keep=["name"])
    tensors = ray.data.from_numpy(np.zeros((4, 2, 3))).rename_columns({"data": "features"})
    with pytest.raises(ValueError, match="expected one list of numbers per row"):
        on_ray.fit(fdbd.Guard(HEAD, "fdbd"), tensors)
    with pytest.raises(ValueError, match="together with a head"):
        on_ray.fit(fdbd.FDBD(), dataset)
    with pytest.raises(RuntimeError, match="no threshold: call calibrate"):
        on_ray.score(fdbd.Guard(HEAD, "fdbd").fit([fdbd.Batch(features)]), dataset)
    with pytest.raises(ValueError, match="at least 1"):
        on_ray.Workers(0)
    features[13, 2] = float("nan")
    with pytest.raises(ValueError, match=r"^batch 0, row 13: .*NaN") as caught:
        on_ray.fit(guard, ray.data.from_arrow(features_table(features, labels)))
    assert "\n" not in str(caught.value)


@SLOW
def test_a_network_is_fitted_calibrated_and_asked_over_images(cluster, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 8, 8, 3), dtype=np.uint8)
    for number, array in enumerate(pixels[60:]):
        image.fromarray(array).save(tmp_path / f"{number:02}.png")
    (tmp_path / "30.png").write_bytes(b"no image")
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 4))
        .double()
        .eval()
    )
    preprocess = Preprocess(8)
    model = nn.Sequential(ToDouble(), *model)
    labels = np.arange(60) % 4

    train = ray.data.from_items([{"image": pixels[row], "label": labels[row]} for row in range(40)])
    calibration = ray.data.from_items([{"image": pixels[row]} for row in range(40, 60)])
    found = on_ray.fit(
        fdbd.Guard(model, "vim"),
        train,
        preprocess=preprocess,
        workers=on_ray.Workers(2, batch_size=7),
    )
    expected = fdbd.Guard(model, "vim").fit(
        [(preprocess(pixels[:40]), torch.from_numpy(labels[:40]))]
    )
    assert_same_buffers(found.detector, expected.detector)
    on_ray.calibrate(found, calibration, tpr=0.9, preprocess=preprocess, workers=1)
    expected.calibrate([preprocess(pixels[40:60])], tpr=0.9)
    torch.testing.assert_close(
        found.threshold.value, expected.threshold.value, rtol=1e-6, atol=1e-9
    )
    with pytest.warns(UserWarning, match="also used for the fit"):
        # The fit on the cluster remembers what it saw.
        found.calibrate([preprocess(pixels[:40])])
    with pytest.warns(UserWarning, match="also used for the fit"):
        on_ray.calibrate(found, train, preprocess=preprocess, workers=1)
    files = ray.data.from_items([{"path": str(path)} for path in sorted(tmp_path.glob("*.png"))])
    found.threshold = expected.threshold
    gaps = ray.data.from_items(
        [{"image": pixels[0] if row % 2 else None} for row in range(3)], override_num_blocks=1
    )
    assert [
        row["error"] is None for row in on_ray.score(found, gaps, preprocess=preprocess).take_all()
    ] == [0, 1, 0]
    rows = (
        on_ray.score(found, files, preprocess=preprocess, workers=2).to_pandas().sort_values("path")
    )
    decision = expected(preprocess(pixels[60:]))
    np.testing.assert_allclose(rows["score"][:-1], decision.scores, rtol=1e-6, atol=1e-6)
    assert rows["is_ood"].tolist() == [*decision.is_ood.tolist(), True]
    assert rows["error"].isna().tolist() == [True] * 30 + [False]
    assert "30.png" in rows["error"].iloc[-1]


class ToDouble(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.double()


class Slow(nn.Module):
    """Leaves a mark for the node that it runs on, and takes its time."""

    def __init__(self, marks: Path) -> None:
        super().__init__()
        self.marks = marks
        self.head = nn.Linear(6, 4).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
        (self.marks / node).touch()
        time.sleep(0.15)
        return self.head(inputs)


def hand_back(marks: Path, piece: object) -> tuple[str, object]:
    """Work that gives a piece back. The first process that meets the piece "stop" is stopped, as by
    a debugger."""
    (marks / ray.get_runtime_context().get_node_id()).touch()
    if piece == "stop" and not (marks / "stopped").exists():
        (marks / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)
    return "done", piece


def run_pieces(
    workers: on_ray.Workers, marks: Path, pieces: Sequence[object]
) -> list[tuple[object, object]]:
    """All pieces with their results."""
    return list(workers.run(fdbd.Guard(HEAD), functools.partial(hand_back, marks), pieces))


def processes_of(node) -> list[int]:
    """Process ids of a node's raylet and its workers."""
    [raylet] = [each.process.pid for each in node.all_processes["raylet"]]
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(raylet)], capture_output=True, text=True, check=False
    )
    return [raylet, *map(int, found.stdout.split())]


def wait_for(mark: Path, work: threading.Thread) -> None:
    deadline = time.monotonic() + 240
    while not mark.exists():
        assert work.is_alive(), "the work ended before the node took part in it"
        assert time.monotonic() < deadline, "the node never took part in the work"
        time.sleep(0.05)


@SLOW
# A hang is a failure.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("job", "end"),
    [("score", "kill"), ("fit", "kill"), ("pieces", "kill"), ("pieces", "stop"), ("score", "stop")],
)
def test_a_node_that_dies_or_stops_in_the_middle_costs_no_row_and_doubles_none(
    cluster, job, end, tmp_path, monkeypatch
):
    torch.manual_seed(0)
    model = Slow(tmp_path).eval()
    inputs, labels = make_features(600, torch.float64)
    expected = (
        fdbd.Guard(model, "mds")
        .fit([(inputs, labels)])
        .calibrate([make_features(100, torch.float64, 2)[0]])
    )
    items = [
        {"id": row, "inputs": inputs[row].numpy(), "label": int(labels[row])} for row in range(600)
    ]
    dataset = ray.data.from_items(items, override_num_blocks=60)
    workers = on_ray.Workers(6, batch_size=10)
    fitted = fdbd.Guard(model, "mds")
    node = cluster.add_node(**NODE, resources={"doomed": 1})
    cluster.wait_for_nodes()
    name = next(
        one["NodeID"] for one in ray.nodes() if one["Alive"] and "doomed" in one["Resources"]
    )
    rows: list[dict] = []

    def work() -> None:
        if job == "fit":
            on_ray.fit(fitted, dataset, column="inputs", workers=workers)
        elif job == "score":
            rows.extend(
                on_ray.score(expected, dataset, column="inputs", workers=workers).iter_rows()
            )
        else:
            rows.extend({"id": piece} for piece, _ in run_pieces(workers, tmp_path, range(600)))

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(tmp_path / name, thread)
    if end == "stop":
        for process in processes_of(node):
            os.kill(process, signal.SIGSTOP)
        thread.join()
    cluster.remove_node(node, allow_graceful=False)
    thread.join()
    if job == "fit":
        assert_same_buffers(fitted.detector, expected.detector)
        return
    assert sorted(row["id"] for row in rows) == list(range(600))
    if job == "score":
        scores = [row["score"] for row in sorted(rows, key=lambda row: row["id"])]
        np.testing.assert_allclose(scores, expected.score(inputs), rtol=1e-6, atol=1e-6)


@SLOW
@pytest.mark.timeout(120)
def test_work_that_a_stopped_process_keeps_is_done_by_another(cluster, tmp_path, monkeypatch):
    pieces = ["a", "b", "stop", "c"]
    found = dict(run_pieces(on_ray.Workers(2), tmp_path, pieces))
    # Ray has usually killed it by now.
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((tmp_path / "stopped").read_text()), signal.SIGKILL)
    assert found == {piece: ("done", piece) for piece in pieces}


@contextlib.contextmanager
def foreign_job():
    """Somebody else's actors, which hold all but half a CPU of each node."""

    @ray.remote(num_cpus=1.5)
    class Holder:
        def ready(self) -> bool:
            return True

    holders = [Holder.remote() for _ in range(2)]
    ray.get([holder.ready.remote() for holder in holders])
    try:
        yield
    finally:
        for holder in holders:
            ray.kill(holder)


@pytest.mark.timeout(120)
def test_a_job_that_gets_no_resources_ends_with_a_sentence_that_names_them(cluster, tmp_path):
    workers = on_ray.Workers(2, cpus=1.5, patience=3.0)
    features, labels = make_features(20)
    guard = feature_guard(features)
    dataset = ray.data.from_arrow(features_table(features, labels)).materialize()
    with foreign_job():
        with pytest.raises(TimeoutError, match=r"a task needs 1.5 CPUs on one node, and 1 of 4"):
            run_pieces(workers, tmp_path, range(3))
        with pytest.raises(
            TimeoutError, match=r"no result for 3 seconds: a task needs 1.5 CPUs on one node"
        ):
            on_ray.calibrate(guard, dataset, workers=workers)
        with pytest.raises(ray.data.exceptions.ExecutionTimeoutError, match=r"task with 1.5 CPUs"):
            on_ray.score(guard, dataset, workers=workers).take_all()


@SLOW
@pytest.mark.timeout(120)
def test_a_foreign_job_leaves_what_it_does_not_hold(cluster, tmp_path):
    with foreign_job():
        found = dict(run_pieces(on_ray.Workers(cpus=0.5), tmp_path, range(20)))
    assert sorted(found) == list(range(20))


@pytest.mark.timeout(120)
def test_a_task_that_fits_on_no_node_says_so(cluster, tmp_path):
    with pytest.raises(TimeoutError, match="none of which is large enough"):
        run_pieces(on_ray.Workers(cpus=3, patience=1.0), tmp_path, range(3))


@SLOW
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cpus", [0.5, 1.0, 1.5, 2.0])
def test_two_jobs_at_once_share_the_cluster(cluster, cpus, tmp_path):
    features, labels = make_features(1003)
    guard = feature_guard(features)
    workers = on_ray.Workers(2, cpus=cpus, batch_size=64)
    path = write_features(tmp_path, features, labels, 3)
    results: list[list[int]] = [[], []]
    dataset = ray.data.read_parquet(path, override_num_blocks=5)

    def work(ids: list[int]) -> None:
        ids.extend(row["id"] for row in on_ray.score(guard, dataset, workers=workers).iter_rows())

    threads = [threading.Thread(target=work, args=(ids,)) for ids in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(ids) for ids in results] == [list(range(1003))] * 2


def write_files(folder: Path, kind: str) -> tuple[list[object], str]:
    """The arguments of a fit on files of a kind, and what is to be scored then."""
    if kind == "images":
        image = pytest.importorskip("PIL.Image")
        pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
        for number, array in enumerate(pixels):
            (folder / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
            image.fromarray(array).save(folder / "images" / "ab"[number % 2] / f"{number:02}.png")
        (folder / "images" / "a" / "damaged.png").write_bytes(b"no image")
        return ["cifar10-ce", "images", "--network-never-saw-data"], "images"
    features, labels = make_features(1003)
    np.savez(folder / "head.npz", weight=HEAD.weight.numpy(), bias=HEAD.bias.numpy())
    if kind == "parquet":
        pq.write_table(
            features_table(features, labels), folder / "features.parquet", row_group_size=50
        )
    else:
        np.savez(folder / "features.npz", features=features.numpy(), label=labels.numpy())
    options = ["--head", "head.npz", "--detector", "mds", "--network-never-saw-data"]
    return [f"features.{kind}", *options], f"features.{kind}"


@SLOW
@pytest.mark.parametrize("kind", ["parquet", "npz", "images"])
def test_files_are_fitted_and_scored_as_by_the_local_engine(
    cluster, kind, tmp_path, monkeypatch, result
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scoring, "FEATURE_PART_ROWS", 100)
    monkeypatch.setattr(scoring, "PART_ROWS", 16)
    arguments, data = write_files(tmp_path, kind)
    on_cluster = ["--engine", "ray", "--workers", 2, "--batch-size", 8]
    local = result("fit", *arguments, "--out", "local.safetensors", "--batch-size", 8)
    spread = result("fit", *arguments, "--out", "ray.safetensors", *on_cluster)
    same = ("fit_rows", "calibration_rows", "left_out")
    assert [spread[name] for name in same] == [local[name] for name in same]
    assert local["left_out"] == (1 if kind == "images" else 0)
    expected, found = fdbd.load("local.safetensors"), fdbd.load("ray.safetensors")
    # float32 features, summed in float64.
    for (
        name,
        tensor,
    ) in expected.detector.state_dict().items():
        torch.testing.assert_close(
            found.detector.state_dict()[name], tensor, rtol=1e-5, atol=1e-6, msg=name
        )
    torch.testing.assert_close(
        found.threshold.value, expected.threshold.value, rtol=1e-5, atol=1e-6
    )
    result("score", "local.safetensors", data, "--out", "local.parquet", "--batch-size", 8)
    result("score", "local.safetensors", data, "--out", "ray.parquet", *on_cluster)
    one, other = pq.read_table("local.parquet"), pq.read_table("ray.parquet")
    assert len(one) == (41 if kind == "images" else 1003)
    np.testing.assert_allclose(
        *[table["score"].to_numpy() for table in (other, one)], rtol=1e-6, atol=1e-6
    )
    assert other.drop_columns(["score", "p_value"]).equals(one.drop_columns(["score", "p_value"]))


class Deadly(Sequence):
    """One image, which ends the process that decodes it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)


@SLOW
# A hang is a failure.
@pytest.mark.timeout(300)
def test_a_file_that_crashes_its_decoder_ends_the_job_in_one_sentence(cluster):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).eval(), torch.rand(50, 3, 4, 4)
    guard = fdbd.Guard(model).fit([inputs[:25]]).calibrate([inputs[25:]])
    rows = Images(Deadly(), source="deadly")
    work = scoring.Scoring(OpenedGuard(guard, Preprocess(4), ()), rows).part
    tables = on_ray.Workers(1).run(guard, work, [(0, range(1))])
    with pytest.raises(RuntimeError, match="a worker died 4 times over the same piece of work"):
        list(tables)


@SLOW
def test_reading_waits_for_the_model(cluster, tmp_path):
    """100 blocks of 8 MB through nodes that hold 300 MB together: a read that went on while the
    model is busy would spill to disk."""
    read, scored = tmp_path / "read", tmp_path / "scored"
    read.mkdir()
    scored.mkdir()

    def block(batch):
        [number] = batch["id"]
        (read / str(number)).touch()
        return {
            "id": [number] * 100,
            "inputs": np.random.default_rng(number).standard_normal((100, 10_000)),
        }

    class Busy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 4).double()

        def forward(self, inputs):
            time.sleep(0.2)
            (scored / str(time.time_ns())).touch()
            return self.head(inputs[:, :6])

    model = Busy().eval()
    guard = (
        fdbd.Guard(model)
        .fit([torch.randn(50, 10).double()])
        .calibrate([torch.randn(50, 10).double()])
    )
    # Half a CPU for a task: tasks with the needs of the actors would become one with them, and
    # prove nothing.
    dataset = ray.data.range(100, override_num_blocks=100).map_batches(
        block, batch_size=1, num_cpus=0.5
    )
    decisions = on_ray.score(
        guard, dataset, column="inputs", workers=on_ray.Workers(1, batch_size=100)
    )
    seen, ahead = [], []
    for batch in decisions.iter_batches(batch_size=100):
        seen += batch["id"].tolist()
        ahead.append(len(list(read.iterdir())) - len(list(scored.iterdir())))
    assert sorted(seen) == sorted(list(range(100)) * 100)
    assert max(ahead[:50]) <= 25


def page_blocks() -> list[tuple[str, str]]:
    """Language and code of the blocks in docs/production/cluster.md."""
    page = (Path(__file__).parents[2] / "docs" / "production" / "cluster.md").read_text(
        encoding="utf-8"
    )
    return re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)


@SLOW
def test_the_commands_on_the_page_run_as_they_stand(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    features, labels = make_features(500)
    calibration, today = make_features(100, seed=2), make_features(300, seed=3)
    feature_guard(features).save("guard.safetensors")
    tables = {
        "train": (features, labels),
        "calibration": calibration,
        "fresh": calibration,
        "today": today,
    }
    for name, data in tables.items():
        pq.write_table(features_table(*data), f"{name}.parquet", row_group_size=100)
    np.savez("head.npz", weight=HEAD.weight.numpy(), bias=HEAD.bias.numpy())
    arrays = {
        "features": features,
        "calibration": calibration[0],
        "weight": HEAD.weight,
        "bias": HEAD.bias,
    }
    np.savez("train.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    names = {"fdbd": fdbd, "head": HEAD}
    blocks = page_blocks()
    assert [language for language, _ in blocks] == ["bash", "python", "python", "bash"]
    for language, code in blocks:
        if language == "bash":
            run = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr
        elif code.startswith("# fit_nightly.py"):
            Path("fit_nightly.py").write_text(code)
        else:
            exec(compile(code, "cluster.md", "exec"), names)
    expected = names["guard"].decide(fdbd.Batch(today[0]))
    assert pq.read_table("scores.parquet")["row"].to_pylist() == list(range(300))
    scored = pq.read_table("scored").sort_by("id")
    assert scored["id"].to_pylist() == list(range(300))
    np.testing.assert_allclose(scored["score"], expected.scores, rtol=1e-6, atol=1e-6)
    assert_same_buffers(fdbd.load("guard.safetensors").detector, names["guard"].detector)


@SLOW
def test_the_nightly_example_finds_the_strange_day(cluster, tmp_path):
    example = Path(__file__).parents[2] / "examples" / "nightly_ray.py"
    run = subprocess.run(
        [sys.executable, str(example), str(tmp_path), "--address", cluster.address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    assert "2000 rows" in run.stdout
    assert sorted(pq.read_table(tmp_path / "scores")["id"].to_pylist()) == list(range(2000))
