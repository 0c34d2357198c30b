"""fdbd fit: fit and calibrate a guard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fdbd.commands import options

_HEAD_FILES = (".npz", ".safetensors")


def fit(
    model: Annotated[
        str,
        typer.Argument(
            help="A zoo name, timm:NAME, torchvision:NAME, package.module:factory, or a .pt2 file of torch.export; "
            "left out with --head FILE.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Argument(
            help="Training data: a folder of images (one folder a class), an .npz of images, the name of a dataset, "
            "or a .parquet or .npz of features.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The guard's file.")] = Path("guard.safetensors"),
    checkpoint: Annotated[
        Path | None, typer.Option(help="The model's weights: .safetensors, or a state dict by torch.save.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Classes of the model, where the checkpoint does not tell.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="For features without a model: an .npz or .safetensors with weight (C, P) and bias (C,). "
            "With a model: the name of its last linear layer, where it is not found."
        ),
    ] = None,
    preprocess: Annotated[
        str | None, typer.Option(help="How images are prepared: cifar10, imagenet, …, or fields as JSON.")
    ] = None,
    detector: Annotated[str, typer.Option(help="A detector's name, such as fdbd, knn, react+energy.")] = "fdbd",
    shaping: Annotated[str | None, typer.Option(help="An activation shaping before it: react, ash-s, scale, …")] = None,
    tpr: Annotated[
        float | None, typer.Option(help="Share of in-distribution data to accept; 0.95 where neither is given.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Instead: the largest share of false alarms (conformal).")] = None,
    per_class: Annotated[bool, typer.Option(help="A threshold for each predicted class.")] = False,
    calibration: Annotated[
        str | None, typer.Option(help="Data for the threshold; default: a share of DATA that the fit does not see.")
    ] = None,
    holdout: Annotated[float, typer.Option(help="That share.")] = 0.2,
    engine: options.EngineName = options.Engine.local,
    address: options.Address = None,
    batch_size: options.BatchSize = 128,
    workers: options.Workers = None,
    device: options.Device = None,
    trust_model: options.TrustModel = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit a guard on training data, calibrate it on data apart, and save it.

    Examples: `fdbd fit cifar10-ce ./images`, `fdbd fit timm:resnet50 ./train --calibration ./val --alpha 0.05`,
    `fdbd fit features.parquet --head head.npz --out guard.safetensors`
    """
    from fdbd.core.batch import Head
    from fdbd.jobs.fitting import fit_files, read_head
    from fdbd.networks.by_name import NamedModel, model_by_name

    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {str(out.parent)!r} does not exist; create it first")
    is_head_file = head is not None and head.lower().endswith(_HEAD_FILES)
    source: NamedModel | Head
    if is_head_file:
        assert head is not None
        if data is not None:
            raise ValueError(f"with --head {head} there is no model: leave {model!r} or --head out")
        source, data, head = read_head(head), model, None
    else:
        if data is None:
            raise ValueError(f"fdbd fit {model} is given no data: fdbd fit MODEL DATA, or fdbd fit DATA --head FILE")
        home = "cpu" if engine is options.Engine.ray else device  # on Ray it goes to its device in the actors
        source = model_by_name(
            model, checkpoint, num_classes=num_classes, preprocess=preprocess, trust=trust_model, device=home
        )
    fitted = fit_files(
        source,
        data,
        calibration=calibration,
        holdout=holdout,
        head=head,
        detector=detector,
        shaping=shaping,
        tpr=tpr,
        alpha=alpha,
        per_class=per_class,
        engine=engine.value,
        address=address,
        device=device,
        batch_size=batch_size,
        workers=workers,
        progress=not as_json,
    )
    guard, threshold = fitted.guard, fitted.guard.threshold
    assert threshold is not None
    guard.save(out)
    found = {
        "guard": str(out),
        "detector": guard.detector.label,
        "fit_rows": fitted.fit_rows,
        "calibration_rows": fitted.calibration_rows,
        "left_out": len(fitted.errors),
        "threshold": threshold.value.tolist(),
        "guarantee": threshold.guarantee,
    }
    held = f"calibrated on {fitted.calibration_rows:,} {'held out' if calibration is None else f'of {calibration}'}"
    shown = f"{out}: {guard.detector.label} fitted on {fitted.fit_rows:,} rows, {held}. {threshold.guarantee}"
    typer.echo(json.dumps(found) if as_json else shown)
    if fitted.errors:
        typer.echo(f"fdbd: {len(fitted.errors)} rows were left out, the first: {fitted.errors[0]}", err=True)
