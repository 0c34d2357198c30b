"""Pictures of the documentation that are drawn by code: `python tools/site_pictures.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import fdbd
from fdbd.geometry import distances

BLUE = "#4477aa"
RED = "#cc3311"
GREY = "#57606a"
STYLE = {"svg.hashsalt": "fdbd", "font.size": 11, "svg.fonttype": "none"}


def draw(folder: Path) -> None:
    """Write guarded-model.svg and geometry.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, figure in (("guarded-model", guarded_model()), ("geometry", geometry())):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def guarded_model() -> Figure:
    """What runs when a guard is asked: the model as it was, and beside its head the score and the
    threshold."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 9), ylim=(0, 3.4))
    axes.axis("off")
    boxes = {
        "input": (0.1, 2.1, 1.1, "images, text,\nfeatures", "white"),
        "network": (1.7, 2.1, 1.5, "network\n(unchanged)", "#e8eef5"),
        "features": (3.7, 2.1, 1.2, "features z\n(N, P)", "white"),
        "head": (5.4, 2.1, 1.3, "linear head\nWz + b", "#e8eef5"),
        "logits": (7.4, 2.1, 1.5, "logits, label\n(N, C)", "white"),
        "detector": (3.55, 0.5, 1.5, "detector:\nscore per row", "#fbeee9"),
        "threshold": (5.4, 0.5, 1.3, "threshold,\np-value", "#fbeee9"),
        "decision": (7.4, 0.5, 1.5, "is_ood\n(N,)", "white"),
    }
    for x, y, width, text, colour in boxes.values():
        axes.add_patch(
            FancyBboxPatch((x, y), width, 0.8, boxstyle="round,pad=0.04", fc=colour, ec=BLUE)
        )
        axes.text(x + width / 2, y + 0.4, text, ha="center", va="center")

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=GREY))

    for left, right in (
        ("input", "network"),
        ("network", "features"),
        ("features", "head"),
        ("head", "logits"),
    ):
        arrow((sum(boxes[left][::2][:2]) + 0.05, 2.5), (boxes[right][0] - 0.05, 2.5))
    for left, right in (("detector", "threshold"), ("threshold", "decision")):
        arrow((sum(boxes[left][::2][:2]) + 0.05, 0.9), (boxes[right][0] - 0.05, 0.9))
    arrow((4.3, 2.05), (4.3, 1.35))
    arrow((7.6, 2.05), (4.95, 1.35))
    axes.text(
        0.1, 0.9, "fitted on training data,\ncalibrated on fresh data", color=GREY, va="center"
    )
    return figure


def geometry() -> Figure:
    """Three classes in two dimensions: distances to the boundaries of one sample, and the score
    over the plane."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.tensor([90.0, 210.0, 330.0]).deg2rad()
    centers = 2.2 * torch.stack([angles.cos(), angles.sin()], dim=1)
    head = fdbd.Head(centers, torch.zeros(3))
    labels = torch.arange(180) % 3
    features = centers[labels] + 0.35 * torch.randn(180, 2, generator=generator)
    detector = fdbd.FDBD().fit(fdbd.Batch(features), head)
    side = np.linspace(-4, 4, 200)
    grid = torch.tensor(
        np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2), dtype=torch.float32
    )
    scores = detector.score(fdbd.Batch(grid)).reshape(200, 200)

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal", xticks=[], yticks=[])
        for angle in (angles + np.pi).tolist():
            axes.plot([0, 6 * np.cos(angle)], [0, 6 * np.sin(angle)], color=GREY, lw=1)
        axes.scatter(*features.T, s=6, c=BLUE, alpha=0.6)
    sample = torch.tensor([[0.9, 2.6]])
    lengths = distances(sample, head)[0]
    for c in (1, 2):
        normal = (centers[0] - centers[c]) / (centers[0] - centers[c]).norm()
        foot = sample[0] - lengths[c] * normal
        left.plot(*zip(sample[0].tolist(), foot.tolist()), color=RED, lw=1.5)
        left.annotate(f"{float(lengths[c]):.2f}", ((sample[0] + foot) / 2).tolist(), color=RED)
    mean = features.mean(dim=0)
    left.plot(*zip(sample[0].tolist(), mean.tolist()), color="black", lw=1, ls="--")
    left.scatter(*sample[0].tolist(), color=RED, zorder=3)
    left.scatter(*mean.tolist(), color="black", marker="x", zorder=3)
    left.set_title(
        "distances to the boundaries (red),\ndeviation from the training mean (dashed)", fontsize=11
    )
    image = right.pcolormesh(side, side, scores, cmap="RdBu", shading="auto", rasterized=True)
    right.set_title("fDBD score: mean distance / deviation", fontsize=11)
    figure.colorbar(image, ax=right, shrink=0.8)
    return figure


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
