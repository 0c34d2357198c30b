"""What a score costs: compared with one read of the features, pytorch-ood and the head, and in a
guarded model.

    python benchmarks/score.py [--quick]

Also what folding and fitting cost, in time and in memory. Writes its sections of RESULTS.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _common import (
    Timings,
    in_own_process,
    interleaved,
    machine,
    seconds_text,
    table,
    write_section,
    writes,
)
from torch import Tensor, nn

import fdbd
from fdbd import FDBD, Batch, Head
from fdbd.fitting.statistics import Mean
from fdbd.geometry import Folded
from fdbd.networks.by_name import model_by_name

SHAPES = [(20_000, 2048, 1_000), (20_000, 768, 1_000), (100_000, 512, 10), (2_000, 768, 21_841)]
"""N, P, C."""
PEER = "pytorch-ood"


class Case(NamedTuple):
    """Features like those of a trained network, their logits and the mean of a training set."""

    features: Tensor
    logits: Tensor
    mean: Tensor
    head: Head

    @classmethod
    def random(cls, rows: int, width: int, classes: int) -> Case:
        torch.manual_seed(0)
        head = Head(torch.randn(classes, width) / width**0.5, torch.randn(classes) / 10)
        features = torch.randn(rows, width).relu_()
        features += head.weight[torch.randint(classes, (rows,))].relu() * 4
        return cls(features, head(features), features[: rows // 2].mean(dim=0), head)


class Given(nn.Module):
    """Stands in for the peer's head, so that its score stage, like ours, starts from given
    logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, _: Tensor) -> Tensor:
        return self.logits


def peer_of(problem: Case) -> Any:
    """pytorch-ood's detector as its own fit leaves it, except that the table of norms, which its
    fit computes through a C × C × P array, is filled block by block, and only in the rows of
    classes that are predicted."""
    from pytorch_ood.detector import fDBD

    peer = fDBD(nn.Identity(), Given(problem.logits))
    weight = problem.head.weight.double()
    norms = torch.ones(len(weight), len(weight))
    for classes in problem.logits.argmax(dim=1).unique().split(500):
        norms[classes] = torch.cdist(weight[classes], weight).float()
    peer._denom_matrix = norms.fill_diagonal_(1)
    peer.train_mean = problem.mean
    return peer


def detector_of(head: Head, folded: Folded) -> FDBD:
    """A fitted detector that does not fold the head a second time."""
    detector = FDBD()
    detector._start_fit(head)
    detector.set_buffers(
        normals=folded.normals, offsets=folded.offsets, center=folded.center, floor=folded.floor
    )
    return detector


def exact_scores(problem: Case, predicted: Tensor) -> Tensor:
    """The paper's formula in float64, boundary by boundary."""
    weight = problem.head.weight.double()
    bias = problem.head.bias.double()
    mean = problem.mean.double()
    scores = torch.empty(len(predicted), dtype=torch.float64)
    for k in predicted.unique().tolist():
        rows = predicted == k
        z = problem.features[rows].double()
        normals = weight[k] - weight
        gaps = z @ normals.T + bias[k] - bias
        # The class has no boundary with itself: its gap is 0, and adds nothing.
        distances = gaps / normals.norm(dim=1).clamp_min(1e-300)
        average = distances.sum(dim=1) / (len(weight) - 1)
        scores[rows] = average / (z - mean).norm(dim=1)
    return scores


def relative_error(scores: Tensor, exact: Tensor) -> float:
    return float(((scores - exact) / exact).abs().max())


def score_stage(quick: bool) -> str:
    times = []
    ratios = []
    missed = []
    errors_of = ("error, labels", "error, logits", f"error, {PEER}")
    for rows, width, classes in SHAPES:
        if quick:
            rows = rows // 10
            classes = min(classes, 1_000)
        problem = Case.random(rows, width, classes)
        features, logits, mean, head = problem
        folded = Folded(head, mean)
        detector = detector_of(head, folded)
        predicted = logits.argmax(dim=1)
        batch = Batch(features, logits)
        peer = peer_of(problem)
        normals = folded.normals[predicted.unique()]
        contenders: dict[str, Callable[[], Any]] = {
            "read": lambda f=features: f.sum(),
            "read with normals": lambda f=features, n=normals: (f.sum(), n.sum()),
            "read with logits": lambda f=features, y=logits: (f.sum(), y.sum()),
            "labels": lambda s=folded, f=features, p=predicted: s.score(f, p),
            "logits": lambda d=detector, b=batch: d.score(b),
            "head": lambda f=features, h=head: nn.functional.linear(f, h.weight, h.bias),
            PEER: lambda p=peer, f=features: p.predict_features(f),
        }
        timings = interleaved(contenders, rounds=3 if quick else 7, calls=2 if quick else 3)
        exact = exact_scores(problem, predicted)
        shape = f"{rows:,} × {width}, {classes:,}"
        cells = [shape]
        for name in contenders:
            if not name.startswith("read with"):
                cells.append(seconds_text(timings.seconds(name)))
        from_labels = folded.score(features, predicted)
        from_logits = detector.score(batch)
        of_peer = -peer.predict_features(features)
        for scores in (from_labels, from_logits, of_peer):
            cells.append(f"{relative_error(scores, exact):.1e}")
        times.append(cells)
        ratios.append([shape, *_ratios(timings)])
        missed += _missed(shape, timings, classes)
    return (
        "Time of the score stage in float32, given labels or logits, and largest relative error"
        " against float64:\n\n"
        + table(
            [
                "N × P, C",
                "read",
                "fdbd, labels",
                "fdbd, logits",
                "head's product",
                PEER,
                *errors_of,
            ],
            times,
        )
        + "\nThe same as ratios within a round (median over rounds):\n\n"
        + table(
            [
                "N × P, C",
                "labels / read",
                "labels / read with normals",
                "logits / read with logits",
                f"{PEER} / labels",
                f"{PEER} / logits",
                "head / labels",
                "logits / head",
            ],
            ratios,
        )
        + "\n`read` is `features.sum()`. `read with normals` also sums the folded row of each"
        " predicted class, which the score has to read as well: this adds almost nothing in the"
        " first three rows, and as much as the features in the last, where almost every sample"
        " has a different class. `read with logits` also sums the logits."
        f" {PEER}'s `predict_features` runs with a head that returns the"
        " same logits; its table of norms is filled beforehand. Targets: at most 1.5 × the read,"
        " with logits of features and logits;"
        f" with labels 20 × faster than {PEER} for C ≥ 1,000 and 8 × for C = 10, with logits 10 ×"
        " and 5 ×.\n" + misses(missed)
    )


def _missed(shape: str, timings: Timings, classes: int) -> list[str]:
    found = []
    for given, read in (("labels", "read"), ("logits", "read with logits")):
        ratio = timings.ratio(given, read)
        if ratio > 1.5:
            found.append(f"{shape}: {ratio:.2f} × the read with {given}, not 1.5 ×")
    for given, many, few in (("labels", 20, 8), ("logits", 10, 5)):
        least = many if classes >= 1_000 else few
        ratio = timings.ratio(PEER, given)
        if ratio < least:
            found.append(f"{shape}: {ratio:.1f} × faster than {PEER} with {given}, not {least} ×")
    return found


def misses(found: list[str]) -> str:
    """A sentence on the targets that this run did not meet."""
    return "\nMissed in this run: " + ("; ".join(found) if found else "none") + ".\n"


def _ratios(timings: Timings) -> list[str]:
    """The cells of the table of ratios, in the order of its columns."""
    pairs = [
        ("labels", "read", 2),
        ("labels", "read with normals", 2),
        ("logits", "read with logits", 2),
        (PEER, "labels", 0),
        (PEER, "logits", 0),
        ("head", "labels", 0),
        ("logits", "head", 2),
    ]
    return [f"{timings.ratio(a, b):.{digits}f}" for a, b, digits in pairs]


def one_sample() -> str:
    """What Python adds: a single row of 64 features."""
    head = Head(torch.randn(10, 64), torch.zeros(10))
    detector = FDBD().fit(Batch(torch.randn(100, 64)), head)
    features = torch.randn(1, 64)
    batch = Batch(features, head(features))

    def often(function: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(200):
                function()

        return run

    timings = interleaved(
        {"score": often(lambda: detector.score(batch)), "sum": often(features.sum)}, rounds=9
    )
    return (
        "Scoring one row of 64 features with its logits takes"
        f" {seconds_text(timings.seconds('score') / 200)}; the smallest torch operation"
        f" (`features.sum()`) takes {seconds_text(timings.seconds('sum') / 200)}.\n"
    )


def fit_cost(quick: bool) -> str:
    rows = []
    missed = []
    for count, width, classes in SHAPES[:3]:
        num_rows = count // 10 if quick else count
        features = torch.randn(num_rows, width)
        batch = Batch(features)
        head = Head(torch.randn(classes, width), torch.zeros(classes))
        contenders = {"read": features.sum, "pass": lambda b=batch, w=width: Mean(w).update(b)}
        if classes == 10:
            contenders["whole fit"] = lambda b=batch, h=head: FDBD().fit(b, h)
        timings = interleaved(contenders, rounds=5 if quick else 11)
        whole = "–"
        if "whole fit" in contenders:
            whole = f"{timings.ratio('whole fit', 'read'):.2f}"
        for name in contenders:
            if timings.ratio(name, "read") > 1.5:
                missed.append(
                    f"{num_rows:,} × {width}: {name} {timings.ratio(name, 'read'):.2f} × the read, not"
                    " 1.5 ×"
                )
        rows.append(
            [
                f"{num_rows:,} × {width}",
                seconds_text(timings.seconds("read")),
                seconds_text(timings.seconds("pass")),
                f"{timings.ratio('pass', 'read'):.2f}",
                whole,
            ]
        )
    counts = (5_000, 50_000) if quick else (50_000, 500_000)
    memory = [[f"{count:,} × 512", *_streaming(count)] for count in counts]
    return (
        "The pass over the training data compared with one read of them (target 1.5), and the whole"
        " fit for small C:\n\n"
        + table(["N × P", "read", "the pass", "pass / read", "fit / read"], rows)
        + misses(missed)
        + "\nA streaming fit in batches of 1,000, none of which is kept: growth of peak memory"
        " during the fit.\n\n" + table(["training data", "their size", "peak growth"], memory)
    )


def _streaming(count: int) -> tuple[str, str]:
    code = f"""
import torch
from fdbd import FDBD, Batch, Head
head = Head(torch.randn(100, 512), torch.zeros(100))
FDBD().fit(Batch(torch.randn(1000, 512)), head)
reset_peak()
FDBD().fit((Batch(torch.randn(1000, 512)) for _ in range({count // 1000})), head)
print(0.0, peak())
"""
    _, growth = in_own_process(code)
    return _megabytes(count * 512 * 4), _megabytes(growth)


def fold_cost(quick: bool) -> str:
    rows = []
    shapes = [(1_000, 2_048, "2 s", "200 MB"), (21_841, 768, "60 s", "1.5 GB")]
    for classes, width, seconds, size in shapes[: 1 if quick else 2]:
        code = f"""
import torch
from fdbd import Head
from fdbd.geometry import Folded
small = Head(torch.randn(10, {width}), torch.randn(10))
Folded(small, torch.zeros({width}))
head = Head(torch.randn({classes}, {width}), torch.randn({classes}))
reset_peak()
start = time.perf_counter()
Folded(head, torch.zeros({width}))
print(time.perf_counter() - start, peak())
"""
        took, growth = in_own_process(code)
        rows.append(
            [f"{classes:,} × {width:,}", seconds_text(took), seconds, _megabytes(growth), size]
        )
    return "Folding a head, in a separate process:\n\n" + table(
        ["C × P", "time", "target", "peak memory beyond W", "target"], rows
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def guarded(quick: bool) -> str:
    torch.manual_seed(0)
    # The real one, with its published weights.
    public = model_by_name("public:resnet50", device="cpu").model
    large = guard_of(public, 224)
    small = guard_of(fdbd.networks.create("resnet20"), 32)
    rows = []
    missed = []
    for name, (model, guard), images, rounds, target in [
        ("public:resnet50", large, torch.randn(1, 3, 224, 224), 61, 2),
        ("public:resnet50", large, torch.randn(32, 3, 224, 224), 31, 2),
        ("CIFAR ResNet-20", small, torch.randn(1, 3, 32, 32), 301, None),
    ]:
        contenders = {
            "model": lambda m=model, x=images: m(x),
            "guard": lambda g=guard, x=images: g(x),
        }
        if quick:
            rounds = max(3, rounds // 10)
        with torch.inference_mode():
            timings = interleaved(contenders, rounds=rounds, calls=1, dropped=0)
        fastest = {contender: min(times) for contender, times in timings.rounds.items()}
        ratio = timings.ratio("guard", "model")
        extras = (ratio, fastest["guard"] / fastest["model"])
        seconds = [seconds_text(timings.seconds(contender)) for contender in contenders]
        percent = [f"{100 * extra - 100:+.1f} %" for extra in extras]
        added = timings.seconds("guard") - timings.seconds("model")
        if target is None:
            # A small network takes little more than the calls of a guard.
            wanted = "0.5 ms"
            is_missed = added > 0.0005
        else:
            wanted = f"{target} %"
            is_missed = 100 * ratio - 100 > target
        rows.append([name, str(len(images)), *seconds, *percent, wanted])
        if is_missed:
            missed.append(
                f"{name} at batch {len(images)}: {percent[0]}, {seconds_text(added)}, not {wanted}"
            )
    return (
        "A guarded model, `Guard(model)(x)`, compared with `model(x)`, in alternating calls:"
        " medians, and the fastest call of each, which other programs on the machine disturb"
        " least:\n\n"
        + table(["model", "batch", "model", "guard", "extra", "extra, fastest", "target"], rows)
        + misses(missed)
    )


def guard_of(model: nn.Module, size: int) -> tuple[nn.Module, fdbd.Guard]:
    """A model and its guard, fitted and calibrated on noise."""
    guard = fdbd.Guard(model.eval()).fit(torch.randn(20, 3, size, size).split(5), progress=False)
    return model, guard.calibrate(torch.randn(20, 3, size, size).split(5), progress=False)


SECTIONS: dict[str, tuple[str, list[Callable[[bool], str]]]] = {
    "score": ("Score and fit", [score_stage, lambda _: one_sample(), fit_cost, fold_cost]),
    "guard": ("Guarded models", [guarded]),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the data, few rounds; writes nothing"
    )
    parser.add_argument("--only", choices=SECTIONS, help="one of the sections")
    arguments = parser.parse_args()
    for name, (title, parts) in SECTIONS.items():
        if arguments.only not in (None, name):
            continue
        texts = []
        for part in parts:
            texts.append(part(arguments.quick))
            print(texts[-1], flush=True)
        if writes(arguments.quick):
            how = (
                "\nContenders run in turns, in a different order in each round; a ratio is the"
                f" median over rounds. Written by `python benchmarks/score.py --only {name}`.\n\n"
            )
            description = machine(("torch", "numpy", "numba", PEER))
            write_section(title, description + "\n" + how + "\n".join(texts))


if __name__ == "__main__":
    main()
