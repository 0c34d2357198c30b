"""fdbd fit: fit and calibrate a guard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fdbd.commands import options
from fdbd.commands.options import arg, opt

MODEL = "A zoo name, timm:NAME, torchvision:NAME, package.module:factory or a .pt2 file; left out with --head FILE."
DATA = (
    "Data to fit on, best the network's training data: a folder of images (one folder per class), an .npz of images, "
    "the name of a dataset, or a .parquet or .npz of features."
)
HEAD = (
    "For features without a model: an .npz or .safetensors with weight (C, P) and bias (C,). With a model: the name of "
    "its last linear layer, where it is not found."
)
NEVER_SAW = "Your word that no network was trained on DATA; without --calibration, a part of them sets the threshold."


def fit(
    model: Annotated[str, arg(MODEL)],
    data: Annotated[str | None, arg(DATA)] = None,
    out: Annotated[Path, opt("The guard's file.")] = Path("guard.safetensors"),
    checkpoint: Annotated[Path | None, opt("The model's weights: .safetensors, or a state dict by torch.save.")] = None,
    num_classes: Annotated[int | None, opt("Classes of the model, where the checkpoint does not tell.")] = None,
    head: Annotated[str | None, opt(HEAD)] = None,
    preprocess: Annotated[str | None, opt("How images are prepared: cifar10, imagenet, …, or fields as JSON.")] = None,
    detector: Annotated[str, opt("A detector's name, such as fdbd, knn, react+energy.")] = "fdbd",
    shaping: Annotated[str | None, opt("An activation shaping before it: react, ash-s, scale, …")] = None,
    tpr: Annotated[float | None, opt("Share of the calibration data to accept; default: 0.95, without alpha.")] = None,
    alpha: Annotated[float | None, opt("Instead: the largest share of false alarms (conformal).")] = None,
    per_class: Annotated[bool, opt("A threshold for each predicted class.", "--per-class")] = False,
    calibration: Annotated[
        str | None, opt("Data for the threshold, seen by neither the network's training nor the fit.")
    ] = None,
    network_never_saw_data: Annotated[bool, opt(NEVER_SAW, "--network-never-saw-data")] = False,
    holdout: Annotated[float | None, opt("That part, as a share; default: 0.2.")] = None,
    engine: options.EngineName = options.Engine.local,
    address: options.Address = None,
    batch_size: options.BatchSize = 128,
    workers: options.Workers = None,
    device: options.Device = "auto",
    autocast: options.Autocast = False,
    trust_model: options.TrustModel = False,
    as_json: options.Json = False,
) -> None:
    """Fit a guard, calibrate it on separate data, and save it.

    Calibration data are seen by neither the network's training nor the fit; a threshold set on data that the network
    has seen raises more false alarms than it promises.

    Examples: `fdbd fit cifar10-ce ./train --calibration ./fresh`,
    `fdbd fit timm:resnet50 ./train --calibration ./val --alpha 0.05`,
    `fdbd fit train.parquet --head head.npz --calibration fresh.parquet`
    """
    from fdbd.core.batch import Head
    from fdbd.jobs.fitting import HOLDOUT, RULE, fit_files, read_head
    from fdbd.networks.by_name import NamedModel, model_by_name
    from fdbd.util.files import check_place, refuse_overlap

    if ":" in detector:
        raise ValueError(
            f"--detector is {detector!r}, but a guard's file cannot name code: a detector of your own is compared with "
            f"fdbd bench --detectors {detector}, and fitted in Python with fdbd.Guard(model, detector)"
        )
    check_place(out)
    refuse_overlap(out, [model, data, calibration, checkpoint, head])
    if holdout is not None and (calibration is not None or not network_never_saw_data):
        raise ValueError("--holdout is a share of DATA to calibrate on: it goes with --network-never-saw-data alone")
    source: NamedModel | Head
    if head is not None and head.lower().endswith((".npz", ".safetensors")):
        if data is not None:
            raise ValueError(f"with --head {head} there is no model: leave {model!r} or --head out")
        source, data, head = read_head(head), model, None
    else:
        if data is None:
            raise ValueError(f"fdbd fit {model} is given no data: fdbd fit MODEL DATA, or fdbd fit DATA --head FILE")
        home = "cpu" if engine is options.Engine.ray else device  # on Ray it goes to its device in the workers
        source = model_by_name(
            model, checkpoint, num_classes=num_classes, preprocess=preprocess, trust=trust_model, device=home
        )
    fitted = fit_files(
        source,
        data,
        calibration=calibration,
        network_never_saw_data=network_never_saw_data,
        holdout=HOLDOUT if holdout is None else holdout,
        head=head,
        detector=detector,
        shaping=shaping,
        tpr=tpr,
        alpha=alpha,
        per_class=per_class,
        engine=engine.value,
        address=address,
        device=device,
        autocast=autocast,
        batch_size=batch_size,
        workers=workers,
    )
    guard, threshold = fitted.guard, fitted.guard.threshold
    assert threshold is not None
    guard.save(out)
    found = {
        "guard": str(out),
        "detector": guard.detector.label,
        "fit_rows": fitted.fit_rows,
        "calibration_rows": fitted.calibration_rows,
        "calibration": guard.about["calibration"],
        "fit_accuracy": fitted.fit_accuracy,
        "calibration_accuracy": fitted.calibration_accuracy,
        "left_out": len(fitted.errors),
        "threshold": threshold.value.tolist(),
        "guarantee": threshold.guarantee,
        "cautions": fitted.cautions,
    }
    where = "held out, which the network never saw by your word" if fitted.is_held_out else f"of {calibration}"
    shown = {"fit data": fitted.fit_accuracy, "calibration data": fitted.calibration_accuracy}
    accuracies = [f"{100 * value:.2f} % on the {name}" for name, value in shown.items() if value is not None]
    options.answer(
        found,
        as_json,
        f"{out}: {guard.detector.label} fitted on {fitted.fit_rows:,} rows, calibrated on "
        f"{fitted.calibration_rows:,} {where}. {threshold.guarantee} What it promises for new data rests on this: "
        f"{RULE}.",
        *([f"The model's accuracy: {', '.join(accuracies)}."] if accuracies else []),
    )
    for caution in fitted.cautions:
        options.note(f"caution: {caution}")
    if fitted.errors:
        options.note(f"{len(fitted.errors)} rows were left out, the first: {fitted.errors[0]}")
