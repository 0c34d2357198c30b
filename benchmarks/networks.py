"""The detectors that need the network, compared with their counterparts in pytorch-ood: ODIN, MDS
with input noise, and MDS over several layers; time to fit and to score the same images, and how far
the scores agree.

    python benchmarks/networks.py all of it, about ten minutes on two cores; updates RESULTS.md
    python benchmarks/networks.py --quick few images, under two minutes, nothing written
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from _common import interleaved, machine, seconds_text, table, verdict, write_section, writes
from scipy.stats import spearmanr
from torch import Tensor, nn

import fdbd
from detectors import Side, quiet
from fdbd import Batch, Classifier, Guard, InputPerturbation
from fdbd import networks as models

TITLE = "Detectors that need the network, against pytorch-ood"
CLASSES = 10
BATCH = 100
TEMPERATURE = 1000.0
ODIN_STEP = 0.0014
MDS_STEP = 0.005
LAYERS = ("layer1", "layer2")
"""Beside the penultimate features, which are those of layer3."""
AS_FAST = 0.97
"""Most of each time is the same network's: a ratio closer to 1 than this is noise."""
SAME = 0.99
"""Rank correlation from which on two detectors count as the same one."""


class Data(NamedTuple):
    """The input of both sides."""

    network: models.Network
    fitted: list[tuple[Tensor, Tensor]]
    scored: list[Tensor]


def make_data(fitted: int, scored: int) -> Data:
    """ResNet-20 with random weights, and noisy images of ten random patterns in batches."""
    torch.manual_seed(0)
    network = models.create("resnet20", num_classes=CLASSES).eval()
    patterns = torch.rand(CLASSES, 3, 32, 32)
    labels = torch.arange(fitted + scored) % CLASSES
    images = (patterns[labels] + torch.rand(fitted + scored, 3, 32, 32)) / 2
    known = list(zip(images[:fitted].split(BATCH), labels[:fitted].split(BATCH)))
    return Data(network, known, list(images[fitted:].split(BATCH)))


# ── the two sides
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class Pair(NamedTuple):
    """Ours and pytorch-ood's; `same_fit` if both fits do the same work."""

    name: str
    ours: Side
    theirs: Side
    same_fit: bool = True


def odin(data: Data) -> Pair:
    import pytorch_ood.detector as peer

    def guard() -> Guard:
        return Guard(data.network, fdbd.ODIN(TEMPERATURE, ODIN_STEP)).fit(
            data.fitted, progress=False
        )

    make = partial(peer.ODIN, data.network, eps=ODIN_STEP, temperature=TEMPERATURE)
    return Pair("odin", our_side(guard, data), Side(make, partial(their_scores, data)))


def noisy_mds(data: Data) -> Pair:
    import pytorch_ood.detector as peer

    def guard() -> Guard:
        noise = InputPerturbation(MDS_STEP, objective="score")
        return Guard(data.network, "mds", perturb=noise).fit(data.fitted, progress=False)

    encoder = nn.Sequential(*stages(data.network), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    make = partial(peer.MahalanobisODIN, encoder, eps=MDS_STEP)
    name = f"mds, input noise {MDS_STEP}"
    return Pair(
        name,
        our_side(guard, data),
        Side(lambda: make().fit(data.fitted), partial(their_scores, data)),
    )


def layered_mds(data: Data) -> Pair:
    """Equal weights of the layers."""

    def guard() -> Guard:
        classifier = Classifier(data.network, layers=LAYERS)
        with torch.no_grad():
            batches: list[Batch] = [classifier(batch) for batch in data.fitted]
        return Guard(classifier, fdbd.MDS(LAYERS).fit(batches, classifier.head))

    return Pair(
        f"mds, {len(LAYERS) + 1} layers", our_side(guard, data), their_layers(data, guard())
    )


def weighed_mds(data: Data) -> Pair:
    """A guard's own fit, which learns the weights; pytorch-ood leaves them to the user, so it is
    given ours."""

    def guard() -> Guard:
        return Guard(data.network, fdbd.MDS(LAYERS)).fit(data.fitted, progress=False)

    name = f"mds, {len(LAYERS) + 1} layers, weights learnt"
    return Pair(name, our_side(guard, data), their_layers(data, guard()), same_fit=False)


def our_side(guard: Callable[[], Guard], data: Data) -> Side:
    return Side(guard, lambda fitted: torch.cat([fitted.score(images) for images in data.scored]))


def their_layers(data: Data, guard: Guard) -> Side:
    """pytorch-ood's sum over layers, with the weights of this fitted guard."""
    import pytorch_ood.detector as peer

    penultimate, *inner = (guard.detector.weights / guard.detector.scale).tolist()
    make = partial(peer.MultiMahalanobis, stages(data.network), alpha=[*inner, penultimate])

    def score(fitted: Any) -> Tensor:
        # Its own predict leaves this to the caller.
        with torch.no_grad():
            return their_scores(data, fitted)

    return Side(lambda: make().fit(data.fitted), score)


def their_scores(data: Data, fitted: Any) -> Tensor:
    """Negated: in pytorch-ood, higher is more out-of-distribution."""
    return -torch.cat([fitted.predict(images) for images in data.scored])


def stages(network: models.Network) -> list[nn.Module]:
    """The network up to its pooling, as consecutive modules."""
    stem = nn.Sequential(network.conv1, network.bn1, nn.ReLU(), network.layer1)
    return [stem, network.layer2, network.layer3]


# ── the table
# ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Row(NamedTuple):
    name: str
    fit: float
    fit_ratio: float
    score: float
    score_ratio: float
    agreement: float


def compare(pair: Pair, rounds: int) -> Row:
    """Our seconds, ratios theirs/ours, and the rank correlation of the scores."""
    sides = {"ours": pair.ours, "theirs": pair.theirs}
    fitted = {name: side.fit() for name, side in sides.items()}
    scores = {name: side.score(fitted[name]).numpy() for name, side in sides.items()}
    # Both have run by now, and a call is seconds of a network's work: no call need be dropped.
    time_all = partial(interleaved, rounds=rounds, calls=1, dropped=0)
    fit = time_all({name: side.fit for name, side in sides.items()})
    score = time_all({name: partial(side.score, fitted[name]) for name, side in sides.items()})
    fit_ratio = fit.ratio("theirs", "ours")
    if not pair.same_fit or fit.seconds("theirs") < 1e-3:
        # What takes less than a millisecond is a call, not work: there is nothing to fit.
        fit_ratio = float("nan")
    agreement = float(spearmanr(scores["ours"], scores["theirs"]).statistic)
    score_ratio = score.ratio("theirs", "ours")
    return Row(
        pair.name, fit.seconds("ours"), fit_ratio, score.seconds("ours"), score_ratio, agreement
    )


def against_pytorch_ood(fitted: int, scored: int, rounds: int) -> tuple[str, list[str]]:
    """The table, and sentences on what it misses."""
    data = make_data(fitted, scored)
    rows = []
    for pair in (odin, noisy_mds, layered_mds, weighed_mds):
        rows.append(compare(pair(data), rounds))
        print("  ".join(cells(rows[-1])), flush=True)
    header = ("detector", "fit", "× faster", "score", "× faster", "rank correlation of the scores")
    title = (
        f"### ResNet-20, C = {CLASSES}: {fitted:,} images fitted, {scored:,} scored, in batches of"
        f" {BATCH}\n\n"
    )
    missed = []
    for row in rows:
        missed += missed_by(row)
    return title + table(header, [cells(row) for row in rows]), missed


def cells(row: Row) -> list[str]:
    fit_ratio = "–" if np.isnan(row.fit_ratio) else f"{row.fit_ratio:.3g}"
    return [
        row.name,
        seconds_text(row.fit),
        fit_ratio,
        seconds_text(row.score),
        f"{row.score_ratio:.3g}",
        f"{row.agreement:.5f}",
    ]


def missed_by(row: Row) -> list[str]:
    missed = []
    if row.score_ratio < AS_FAST:
        missed.append(f"{row.name} scores {row.score_ratio:.2f} × as fast, not 1 ×")
    if row.fit_ratio < AS_FAST:
        missed.append(f"{row.name} fits {row.fit_ratio:.2f} × as fast, not 1 ×")
    if not row.agreement >= SAME:
        missed.append(
            f"{row.name}: the scores' rank correlation is {row.agreement:.3f}, not {SAME}"
        )
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few images; nothing is written")
    arguments = parser.parse_args()
    quiet()
    if arguments.quick:
        text, missed = against_pytorch_ood(fitted=200, scored=100, rounds=1)
    else:
        text, missed = against_pytorch_ood(fitted=2000, scored=500, rounds=9)
    if not writes(arguments.quick):
        print("\nOne round says little: targets are checked without --quick.")
        return
    print("\n" + verdict(missed))
    write_section(TITLE, "\n".join([_about(), text, verdict(missed)]))


def _about() -> str:
    return (
        f"`python benchmarks/networks.py` on {machine(('torch', 'pytorch-ood'))}.\n\nTimes are"
        " ours; “× faster” is pytorch-ood's time divided by ours, as the median of interleaved"
        " rounds with the same network (random weights) and the same images of 32 × 32 in one"
        f" process. Most of each time is spent in the network, so a ratio of at least {AS_FAST}"
        " counts as equally fast. ODIN has nothing to fit. MDS over layers reads"
        f" {' and '.join(LAYERS)} in addition to the penultimate features, with equal weights or"
        " with the weights that a guard learns from adversarial copies of the training images."
        " pytorch-ood learns no weights: it is given ours, so that the scores can be compared, and"
        " the fit that learns them has no counterpart.\n"
    )


if __name__ == "__main__":
    main()
