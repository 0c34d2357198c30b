"""Every detector compared with its counterpart in pytorch-ood: time to fit and to score, peak
memory; KNN compared with faiss; the whole family compared with one forward pass; and fit memory for
different numbers of samples.

    python benchmarks/detectors.py all of it, about half an hour on two cores; updates RESULTS.md
    python benchmarks/detectors.py --quick small arrays, a few minutes, nothing written
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from _common import interleaved, machine, seconds_text, table, verdict, write_section, writes
from torch import Tensor, nn

import fdbd
from fdbd import Batch, Head

SIZES = ((768, 1000), (512, 10))
CPU_COUNTS = ((5000, 1000), (10_000, 2000))
"""Samples fitted and scored at each size where CPU time is measured."""
HOURS = ("openmax", "gradnorm", "knn", "nnguide")
"""pytorch-ood's take minutes of one thread at 1,000 classes; the nearest neighbours do not depend
on the classes."""
QUICK_SIZES = ((128, 50), (128, 10))
NEIGHBOURS = ("knn", "nnguide", "csi")
ALONE = ("ssd", "csi", "residual", "neco", "deviation")
"""Detectors that pytorch-ood does not have."""
SHAPED = ("react", "ash-p", "ash-b", "ash-s", "scale", "vra", "lts")
AS_FAST = 0.8
"""Least speed relative to pytorch-ood: at most a fifth slower."""
# All that need no network; an ensemble is the sum of its members.
NAMES = (
    *("msp", "maxlogit", "energy", "entropy", "gen", "tempscale", "klm", "openmax"),
    *("fdbd", "mds", "rmds", "vim", "nci", "she", "dice", "gradnorm"),
    *SHAPED,
    *NEIGHBOURS,
    *("ssd", "residual", "neco", "deviation"),
)


TITLES = {
    "cpu": "CPU time against pytorch-ood",
    "peers": "Detectors against pytorch-ood",
    "faiss": "Nearest neighbours against faiss",
    "family": "All detectors against one forward pass",
    "memory": "Memory of a streaming fit",
}


class Arrays(NamedTuple):
    """The input of both sides."""

    train: Tensor
    train_logits: Tensor
    labels: Tensor
    test: Tensor
    test_logits: Tensor
    head: Head


def make_arrays(width: int, classes: int, fitted: int, scored: int) -> Arrays:
    """Clustered features after a ReLU, and the head that tells the clusters apart."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(classes, width, generator=generator)
    labels = torch.cat(
        [torch.arange(classes), torch.randint(classes, (fitted - classes,), generator=generator)]
    )
    train = (means[labels] + torch.randn(fitted, width, generator=generator)).relu_()
    test = (means[labels[:scored]] + 1.5 * torch.randn(scored, width, generator=generator)).relu_()
    head = Head(means / width**0.5, torch.randn(classes, generator=generator) / 10)
    return Arrays(train, head(train), labels, test, head(test), head)


# ── the two sides
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Side(NamedTuple):
    """One implementation: `fit` returns a fitted object, which `score` takes."""

    fit: Callable[[], Any]
    score: Callable[[Any], Any]


READ_LOGITS = ("msp", "maxlogit", "energy", "entropy", "gen", "tempscale", "klm", "openmax")


def thinned(name: str, arrays: Arrays) -> Arrays:
    """For the temperature at most 5 million logits: pytorch-ood keeps them for each of 50 steps, 10
    GB otherwise."""
    rows = 5_000_000 // arrays.head.num_classes
    if name != "tempscale":
        return arrays
    return arrays._replace(
        train=arrays.train[:rows],
        train_logits=arrays.train_logits[:rows],
        labels=arrays.labels[:rows],
    )


def ours(name: str, arrays: Arrays) -> Side:
    """Logits are given where pytorch-ood's detector takes logits, and computed from the features
    where it does so."""
    logits = name in READ_LOGITS
    arrays = thinned(name, arrays)
    train = Batch(arrays.train, arrays.train_logits if logits else None, arrays.labels)
    test = Batch(arrays.test, arrays.test_logits if logits else None)
    return Side(
        lambda: fdbd.create(name, **options(name)).fit(train, arrays.head),
        lambda fitted: fitted.score(test),
    )


def options(name: str) -> dict[str, Any]:
    """The peer's settings where defaults differ, so that both sides do the same work."""
    return {"ash-s": {"percentile": 65}, "scale": {"percentile": 65}}.get(name, {})


def theirs(name: str, arrays: Arrays) -> Side | None:
    """pytorch-ood's detector; None where it has none."""
    import pytorch_ood.detector as peer

    if name in ALONE:
        return None
    arrays = thinned(name, arrays)
    weight = arrays.head.weight
    bias = arrays.head.bias
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict({"weight": weight, "bias": bias})
    width = weight.shape[1]

    def on_map(maps: Tensor) -> Tensor:
        return linear(maps.flatten(1))

    maps = arrays.test[:, :, None, None]
    train_maps = arrays.train[:, :, None, None]
    on_logits = {
        "msp": lambda: peer.MaxSoftmax(None),
        "maxlogit": lambda: peer.MaxLogit(None),
        "energy": lambda: peer.EnergyBased(None),
        "entropy": lambda: peer.Entropy(None),
        "gen": lambda: peer.GEN(None, M=min(100, weight.shape[0])),
        "tempscale": (
            lambda: peer.TemperatureScaling(None).fit_logits(arrays.train_logits, arrays.labels)
        ),
        "klm": lambda: peer.KLMatching(None).fit_logits(arrays.train_logits, arrays.labels),
        "openmax": lambda: peer.OpenMax(None).fit_logits(arrays.train_logits, arrays.labels),
    }
    on_features = {
        "fdbd": lambda: peer.fDBD(None, linear),
        "mds": lambda: peer.Mahalanobis(None),
        "rmds": lambda: peer.RMD(None),
        "vim": lambda: peer.ViM(None, fdbd.ViM()._dim(width), weight, bias),
        "knn": lambda: peer.KNN(None, k=50),
        "nnguide": lambda: peer.NNGuide(None, linear, k=10),
        "nci": lambda: peer.NCI(None, linear),
        "she": lambda: peer.SHE(None, linear),
        "dice": lambda: peer.DICE(None, weight, bias, p=0.9),
    }
    on_maps = {
        "ash-p": lambda: peer.ASH(None, on_map, "ash-p"),
        "ash-b": lambda: peer.ASH(None, on_map, "ash-b"),
        "ash-s": lambda: peer.ASH(None, on_map, "ash-s"),
        "scale": lambda: peer.SCALE(None, on_map),
        "react": lambda: peer.ReAct(None, on_map).fit_feature_maps(train_maps, arrays.labels),
        "vra": (
            lambda: peer.VRA(None, on_map, 0.6, 0.95).fit_feature_maps(train_maps, arrays.labels)
        ),
    }
    if name in on_logits:
        return Side(on_logits[name], lambda fitted: fitted.predict_logits(arrays.test_logits))
    if name in on_maps:
        return Side(on_maps[name], lambda fitted: fitted.predict_feature_maps(maps))
    if name == "lts":
        return Side(
            lambda: peer.LTS(None, linear), lambda fitted: fitted.predict_features(arrays.test)
        )
    if name == "gradnorm":
        make = partial(
            peer.GradNorm,
            linear,
            param_filter=lambda parameter: parameter == "weight",
            micro_batch_size=256,
        )
        return Side(lambda: make().to("cpu"), lambda fitted: fitted.predict(arrays.test))
    return Side(
        lambda: on_features[name]().fit_features(arrays.train, arrays.labels),
        lambda fitted: fitted.predict_features(arrays.test),
    )


# ── tables
# ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Row(NamedTuple):
    name: str
    fit: float
    fit_ratio: float
    score: float
    score_ratio: float
    fit_bytes: int
    score_bytes: int
    their_bytes: tuple[int, int]


def compare(name: str, arrays: Arrays, shape: tuple[int, int, int, int]) -> Row:
    """One detector: our seconds, ratios theirs/ours, and peak memory measured in separate
    processes."""
    mine = ours(name, arrays)
    peer = theirs(name, arrays)
    fits: dict[str, Callable[[], Any]] = {"ours": mine.fit}
    scores: dict[str, Callable[[], Any]] = {"ours": partial(mine.score, mine.fit())}
    if peer is not None:
        fits["theirs"] = peer.fit
        scores["theirs"] = partial(peer.score, peer.fit())
    fit = timed(fits)
    score = timed(scores)
    fit_bytes, score_bytes = in_child(memory, "ours", name, shape)
    fit_ratio = float("nan")
    score_ratio = float("nan")
    their_bytes = (0, 0)
    if peer is not None:
        score_ratio = score.ratio("theirs", "ours")
        their_bytes = in_child(memory, "theirs", name, shape)
        # What takes less than a millisecond is a call, and not the work of a fit.
        if fit.seconds("theirs") >= 1e-3:
            fit_ratio = fit.ratio("theirs", "ours")
    return Row(
        name=name,
        fit=fit.seconds("ours"),
        fit_ratio=fit_ratio,
        score=score.seconds("ours"),
        score_ratio=score_ratio,
        fit_bytes=fit_bytes,
        score_bytes=score_bytes,
        their_bytes=their_bytes,
    )


def timed(contenders: dict[str, Callable[[], Any]]) -> Any:
    """As many rounds as a slow contender allows: one call each if that takes half a minute."""
    first = interleaved(contenders, rounds=1, calls=1, dropped=0)
    spent = sum(map(first.seconds, contenders))
    if spent > 30:
        return first
    if spent < 0.2:
        return interleaved(contenders, rounds=9, calls=3)
    if spent < 6:
        return interleaved(contenders, rounds=5, calls=1)
    return interleaved(contenders, rounds=1, calls=1)


def cpu_seconds(contenders: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Least CPU time of a call: other programs that share the machine hardly count. Rounds until a
    second is spent, at least three and at most fifteen after a first call that is dropped; a call
    of more than two seconds is made once."""
    least = {}
    for name, function in contenders.items():
        start = time.process_time()
        function()
        least[name] = time.process_time() - start
    if max(least.values()) > 2:
        return least
    # About five milliseconds in each round, so that the clock's resolution does not matter.
    calls = {}
    for name, seconds in least.items():
        calls[name] = max(1, min(100, round(0.005 / max(seconds, 1e-6))))
    least = dict.fromkeys(contenders, float("inf"))
    spent = 0.0
    for number in range(15):
        for name, function in contenders.items():
            start = time.process_time()
            for _ in range(calls[name]):
                function()
            took = time.process_time() - start
            least[name] = min(least[name], took / calls[name])
            spent += took
        if spent > 1 and number >= 2:
            break
    return least


def cpu_time(width: int, classes: int, fitted: int, scored: int) -> tuple[str, list[str]]:
    """Fits and scores of one size in CPU time of one thread, ours and pytorch-ood's, and what
    misses its target."""
    torch.set_num_threads(1)
    arrays = make_arrays(width, classes, fitted, scored)
    rows = []
    missed = []
    has_many_classes = classes >= 1000
    for name in NAMES:
        if has_many_classes and name in HOURS:
            continue
        # pytorch-ood's take half a minute for 1,000 samples.
        is_slow = has_many_classes and name in ("mds", "rmds")
        given = arrays._replace(test=arrays.test[:100]) if is_slow else arrays
        mine = ours(name, given)
        peer = theirs(name, given)
        if peer is None:
            continue
        cells = [name]
        fit = cpu_seconds({"ours": mine.fit, "theirs": peer.fit})
        score = cpu_seconds(
            {"ours": partial(mine.score, mine.fit()), "theirs": partial(peer.score, peer.fit())},
        )
        for what, seconds in (("fits", fit), ("scores", score)):
            ratio = seconds["theirs"] / seconds["ours"]
            if what == "fits" and seconds["theirs"] < 1e-4:
                # There is nothing to fit.
                cells += ["–", "–"]
                continue
            cells += [seconds_text(seconds["ours"]), f"{ratio:.3g}"]
            least = 100.0 if is_slow and what == "scores" else AS_FAST
            if ratio < least:
                took = seconds_text(seconds["ours"])
                missed.append(
                    f"{name} at C = {classes:,} {what} {ratio:.2f} × as fast, not {least:g} ×"
                    f" ({took})"
                )
        rows.append(cells)
        print("  ".join(cells), flush=True)
    title = f"### P = {width}, C = {classes:,}: {fitted:,} samples fitted, {scored:,} scored\n\n"
    return title + table(("detector", "fit", "× faster", "score", "× faster"), rows), missed


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a fresh process that has imported everything but computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fdbd", "pytorch_ood.detector"])
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def memory(side: str, name: str, shape: tuple[int, int, int, int]) -> tuple[int, int]:
    """Bytes by which resident memory rises in a fit and in a score."""
    quiet()
    arrays = make_arrays(*shape)
    tiny = make_arrays(shape[0], shape[1], 2 * shape[1] + 100, 100)
    make = ours if side == "ours" else theirs
    warm = make(name, tiny)
    chosen = make(name, arrays)
    assert warm is not None
    assert chosen is not None
    # Compiled kernels and thread pools are not counted.
    if name != "openmax":
        warm.score(warm.fit())
    peak = Peak()
    fitted = chosen.fit()
    after_fit = peak.rise()
    peak = Peak()
    chosen.score(fitted)
    return after_fit, peak.rise()


class Peak:
    """How far resident memory rises above now (Linux)."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self.base = self._status("VmRSS")

    def rise(self) -> int:
        return max(0, self._status("VmHWM") - self.base)

    @staticmethod
    def _status(field: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def against_pytorch_ood(
    width: int, classes: int, fitted: int, scored: int
) -> tuple[str, list[str]]:
    """The table of one size, and sentences on what it misses."""
    arrays = make_arrays(width, classes, fitted, scored)
    rows = []
    for name in NAMES:
        rows.append(compare(name, arrays, (width, classes, fitted, scored)))
        print("  ".join(cells(rows[-1])), flush=True)
    missed = []
    for row in rows:
        least = {"mds": 100.0, "rmds": 100.0}.get(row.name, AS_FAST) if classes >= 1000 else AS_FAST
        if row.score_ratio < least:
            missed.append(
                f"{row.name} at P={width}, C={classes} scores {row.score_ratio:.2f} × as fast, not"
                f" {least:g} ×"
            )
        if row.fit_ratio < AS_FAST:
            missed.append(
                f"{row.name} at P={width}, C={classes} fits {row.fit_ratio:.2f} × as fast, not"
                f" {AS_FAST} ×"
            )
    header = (
        "detector",
        "fit",
        "× faster",
        "score",
        "× faster",
        "MB to fit",
        "theirs",
        "MB to score",
        "theirs",
    )
    title = f"### P = {width}, C = {classes:,}: {fitted:,} samples fitted, {scored:,} scored\n\n"
    return title + table(header, [cells(row) for row in rows]), missed


def cells(row: Row) -> list[str]:
    def ratio(value: float) -> str:
        return "–" if np.isnan(value) else f"{value:.3g}"

    def megabytes(count: int) -> str:
        return f"{count / 1e6:.0f}"

    their_fit = "–"
    their_score = "–"
    has_peer = not np.isnan(row.score_ratio)
    if has_peer:
        their_fit = megabytes(row.their_bytes[0])
        their_score = megabytes(row.their_bytes[1])
    return [
        row.name,
        seconds_text(row.fit),
        ratio(row.fit_ratio),
        seconds_text(row.score),
        ratio(row.score_ratio),
        megabytes(row.fit_bytes),
        their_fit,
        megabytes(row.score_bytes),
        their_score,
    ]


def against_faiss(width: int, classes: int, fitted: int, scored: int) -> tuple[str, list[str]]:
    """KNN's exact search against faiss's own, and its approximate indices with their recall."""
    import faiss

    arrays = make_arrays(width, classes, fitted, scored)
    test = Batch(arrays.test)
    exact = fdbd.KNN(50).fit(Batch(arrays.train), arrays.head)
    flat = faiss.IndexFlatL2(width)
    flat.add(exact.bank.numpy())
    queries = fdbd.core.linear_algebra.unit(arrays.test).numpy()
    timing = timed({"exact": lambda: exact.score(test), "faiss": lambda: flat.search(queries, 50)})
    share = timing.ratio("exact", "faiss")
    rows = [
        [
            "faiss IndexFlatL2, its search alone",
            "–",
            seconds_text(timing.seconds("faiss")),
            "1",
            "1",
        ],
        ["KNN(index='exact')", "–", seconds_text(timing.seconds("exact")), f"{share:.2f}", "1"],
    ]
    for index in ("flat", "ivf", "hnsw"):
        detector = fdbd.KNN(50, index=index).fit(Batch(arrays.train), arrays.head)
        start = time.perf_counter()
        detector.score(Batch(arrays.test[:1]))
        built = time.perf_counter() - start
        other = timed({"exact": lambda: exact.score(test), "index": partial(detector.score, test)})
        relative = other.ratio("index", "exact") * share
        rows.append(
            [
                f"KNN(index='{index}')",
                seconds_text(built),
                seconds_text(other.seconds("index")),
                f"{relative:.2f}",
                f"{detector.recall(test):.3f}",
            ]
        )
        print("  ".join(rows[-1]), flush=True)
    missed = (
        []
        if share <= 1.2
        else [f"exact KNN takes {share:.2f} × faiss's time at P={width}, not 1.2 ×"]
    )
    header = ("search", "to build", "score", "time over faiss's", "recall of the 50 nearest")
    title = f"### KNN and faiss: P = {width}, {fitted:,} samples kept, {scored:,} scored\n\n"
    return title + table(header, rows), missed


def against_a_forward_pass(rows: int, images: int) -> tuple[str, list[str]]:
    """All detectors except the KNN family over cached samples, and ResNet-18 over images."""
    from torchvision.models import resnet18

    arrays = make_arrays(512, 10, rows, rows)
    train = Batch(arrays.train, arrays.train_logits, arrays.labels)
    test = Batch(arrays.test, arrays.test_logits)
    network = resnet18(weights=None).eval()
    picture = torch.randn(50, 3, 224, 224)
    with torch.inference_mode():
        network(picture)
        start = time.perf_counter()
        for _ in range(images // 50):
            network(picture)
        forward = time.perf_counter() - start
    fits = {}
    scores = {}
    for name in NAMES:
        if name in NEIGHBOURS:
            continue
        start = time.perf_counter()
        detector = fdbd.create(name).fit(train, arrays.head)
        fits[name] = time.perf_counter() - start
        start = time.perf_counter()
        detector.score(test)
        scores[name] = time.perf_counter() - start
    slowest = sorted(scores, key=lambda name: -scores[name])[:3]
    examples = ", ".join(f"{name} {seconds_text(scores[name])}" for name in slowest)
    text = (
        f"### The whole family and one forward pass\n\n{len(scores)} detectors (without the"
        f" nearest-neighbour family) score {rows:,} cached samples, P = 512, C = 10, in"
        f" {seconds_text(sum(scores.values()))} in total (the slowest: {examples}), and are fitted"
        f" on {rows:,} in {seconds_text(sum(fits.values()))}. ResNet-18 takes"
        f" {seconds_text(forward)} for one forward pass over {images:,} images of 224 × 224.\n"
    )
    print(text, flush=True)
    missed = []
    if sum(scores.values()) >= forward:
        missed.append("the family takes longer than the forward pass")
    return text, missed


class Stream:
    """Batches generated on demand, the same ones each time."""

    def __init__(self, count: int, width: int, classes: int) -> None:
        self.count = count
        self.width = width
        self.classes = classes

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count // 1000):
            labels = torch.randint(self.classes, (1000,), generator=generator)
            yield Batch(torch.randn(1000, self.width, generator=generator).relu_(), None, labels)


def streaming_memory(name: str, count: int) -> int:
    """Bytes by which resident memory rises while a stream of `count` samples is fitted."""
    quiet()
    head = Head(torch.randn(10, 512, generator=torch.Generator().manual_seed(0)))
    fdbd.create(name).fit(Stream(2000, 512, 10), head)
    peak = Peak()
    fdbd.create(name).fit(Stream(count, 512, 10), head)
    return peak.rise()


def fit_memory(counts: tuple[int, int]) -> tuple[str, list[str]]:
    """Peak memory of a streaming fit for two numbers of samples."""
    rows = []
    missed = []
    for name in NAMES:
        small = in_child(streaming_memory, name, counts[0])
        large = in_child(streaming_memory, name, counts[1])
        rows.append([name, f"{small / 1e6:.0f}", f"{large / 1e6:.0f}"])
        print("  ".join(rows[-1]), flush=True)
        if name not in NEIGHBOURS and large > small + 30e6:
            missed.append(
                f"{name}'s fit takes {large / 1e6:.0f} MB for {counts[1]:,} samples,"
                f" {small / 1e6:.0f} before"
            )
    header = ("detector", f"MB for {counts[0]:,} samples", f"MB for {counts[1]:,} samples")
    title = "### Peak memory of a streaming fit: P = 512, C = 10, batches of 1,000\n\n"
    return title + table(header, rows), missed


def quiet() -> None:
    """Two threads at most, and no warnings from the libraries that are measured."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(min(2, torch.get_num_threads()))


class Scale(NamedTuple):
    """How much is measured."""

    sizes: Sequence[tuple[int, int]]
    """Features and classes of each size."""
    fitted: int
    scored: int
    cached: int
    """Samples that the whole family scores beside one forward pass."""
    images: int
    """Images of that forward pass."""
    streamed: tuple[int, int]
    """Samples of the two streaming fits."""


WHOLE = Scale(SIZES, 50_000, 2000, 100_000, 1000, (20_000, 80_000))
QUICK = Scale(QUICK_SIZES, 5000, 500, 10_000, 100, (4000, 12_000))

Step = Callable[[], tuple[str, list[str]]]
"""A measurement: its text, and what misses its target."""


def steps_of(scale: Scale) -> dict[str, list[Step]]:
    """The parts of each section."""
    steps: dict[str, list[Step]] = {"cpu": [], "peers": [], "faiss": []}
    for (width, classes), counts in zip(scale.sizes, CPU_COUNTS):
        steps["cpu"].append(partial(cpu_time, width, classes, *counts))
    for width, classes in scale.sizes:
        arguments = (width, classes, scale.fitted, scale.scored)
        steps["peers"].append(partial(against_pytorch_ood, *arguments))
        steps["faiss"].append(partial(against_faiss, *arguments))
    steps["family"] = [partial(against_a_forward_pass, scale.cached, scale.images)]
    steps["memory"] = [partial(fit_memory, scale.streamed)]
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small arrays; nothing is written")
    parser.add_argument("--only", choices=TITLES, help="one part")
    arguments = parser.parse_args()
    quiet()
    threads = torch.get_num_threads()
    scale = QUICK if arguments.quick else WHOLE
    for name, parts in steps_of(scale).items():
        if arguments.only not in (None, name):
            continue
        texts = [_about(name)]
        missed = []
        for part in parts:
            text, lines = part()
            texts.append(text)
            missed += lines
        if not writes(arguments.quick):
            print("\nSmall arrays measure calls, not work: targets are checked without --quick.")
            continue
        texts.append(verdict(missed))
        print("\n" + verdict(missed))
        write_section(TITLES[name], "\n".join(texts))
        torch.set_num_threads(threads)


def _about(name: str) -> str:
    text = (
        f"`python benchmarks/detectors.py --only {name}` on"
        f" {machine(('torch', 'pytorch-ood', 'faiss-cpu'))}.\n"
    )
    if name == "cpu":
        text += (
            "\nCPU time of one thread, the minimum of several rounds, which other work on the"
            " machine hardly disturbs; “× faster” is pytorch-ood's time divided by ours. At 1,000"
            " classes, MDS and RMDS score 100 samples.\n\nWhere ours costs more: moments are summed"
            " in float64, in which a product and the eigenvectors take twice as long as in float32"
            " (mds, vim); features are read a second time to look for numbers that are not finite,"
            " which clipping would hide (react, vra); the index of the largest logit is needed to"
            " keep the digits of the logarithm of a probability close to 1 (tempscale); and a call"
            " has a fixed cost of about ten microseconds (maxlogit).\n"
        )
    if name == "peers":
        text += (
            "\nTimes are ours; “× faster” is pytorch-ood's time divided by ours, as the median of"
            " interleaved rounds on the same arrays in one process. Megabytes are the increase of"
            " peak resident memory, each measured in a separate process. The temperature is fitted"
            " on at most 5,000,000 logits, since pytorch-ood would need 10 GB for more. Detectors"
            " that need the network are in `networks.py`; AdaSCALE, which pytorch-ood does not"
            " have, is left out.\n"
        )
    return text


if __name__ == "__main__":
    main()
