"""fdbd fit: fit and calibrate a guard."""

from pathlib import Path

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
    model: str = arg(..., MODEL),
    data: str | None = arg(None, DATA),
    out: Path = opt(Path("guard.safetensors"), "The guard's file."),
    checkpoint: Path | None = opt(
        None, "The model's weights: .safetensors, or a state dict by torch.save."
    ),
    num_classes: int | None = opt(
        None, "Classes of the model, where the checkpoint does not tell."
    ),
    head: str | None = opt(None, HEAD),
    preprocess: str | None = opt(
        None, "How images are prepared: cifar10, imagenet, …, or fields as JSON."
    ),
    detector: str = opt("fdbd", "A detector's name, such as fdbd, knn, react+energy."),
    shaping: str | None = opt(None, "An activation shaping before it: react, ash-s, scale, …"),
    tpr: float | None = opt(
        None, "Share of the calibration data to accept; default: 0.95, without alpha."
    ),
    alpha: float | None = opt(None, "Instead: the largest share of false alarms (conformal)."),
    per_class: bool = opt(False, "A threshold for each predicted class.", "--per-class"),
    calibration: str | None = opt(
        None, "Data for the threshold, seen by neither the network's training nor the fit."
    ),
    network_never_saw_data: bool = opt(False, NEVER_SAW, "--network-never-saw-data"),
    holdout: float | None = opt(None, "That part, as a share; default: 0.2."),
    engine: options.Engine = options.ENGINE,
    address: str | None = options.ADDRESS,
    batch_size: int = options.BATCH_SIZE,
    workers: int | None = options.WORKERS,
    device: str = options.DEVICE,
    autocast: bool = options.AUTOCAST,
    trust_model: bool = options.TRUST_MODEL,
    as_json: bool = options.JSON,
) -> None:
    """Fit a guard, calibrate it on separate data, and save it.

    Calibration data are seen by neither the network's training nor the fit; a threshold set on data
    that the network has seen raises more false alarms than it promises.

    Examples: `fdbd fit cifar10-ce ./train --calibration ./fresh`,
    `fdbd fit timm:resnet50 ./train --calibration ./val --alpha 0.05`,
    `fdbd fit train.parquet --head head.npz --calibration fresh.parquet`
    """
    from fdbd.core.batch import Head
    from fdbd.decision.threshold import Target
    from fdbd.jobs.fitting import HOLDOUT, RULE, fit_files, read_head
    from fdbd.jobs.scoring import Engine
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
        raise ValueError(
            "--holdout is a share of DATA to calibrate on: it goes with --network-never-saw-data alone"
        )
    if network_never_saw_data and calibration is None and holdout is None:
        holdout = HOLDOUT
    where = Engine(engine.value, address, device, batch_size, workers)
    source: NamedModel | Head
    if head is not None and head.lower().endswith((".npz", ".safetensors")):
        if data is not None:
            raise ValueError(f"with --head {head} there is no model: leave {model!r} or --head out")
        source, data, head = read_head(head), model, None
    else:
        if data is None:
            raise ValueError(
                f"fdbd fit {model} is given no data: fdbd fit MODEL DATA, or fdbd fit DATA --head FILE"
            )
        source = model_by_name(
            model,
            checkpoint,
            num_classes=num_classes,
            preprocess=preprocess,
            trust=trust_model,
            device=where.home,
        )
    detector = f"{shaping}+{detector}" if shaping else detector
    target = Target(tpr=tpr, alpha=alpha, per_class=per_class)
    fitted = fit_files(
        source,
        data,
        calibration,
        where,
        holdout=holdout,
        head=head,
        detector=detector,
        autocast=autocast,
        **target,
    )
    guard, threshold = fitted.guard, fitted.guard.threshold
    assert threshold is not None
    guard.save(out)
    accuracy = {stage: found.accuracy for stage, found in guard.agreement.items()}
    fit_rows, calibration_rows = fitted.training.num_given, fitted.calibrating.num_given
    errors = [*fitted.training.errors, *fitted.calibrating.errors]
    where_from = (
        "held out, which the network never saw by your word" if holdout else f"of {calibration}"
    )
    accuracies = [
        f"{100 * value:.2f} % on the {stage} data"
        for stage, value in accuracy.items()
        if value is not None
    ]
    options.answer(
        {
            "guard": str(out),
            "detector": guard.detector.label,
            "fit_rows": fit_rows,
            "calibration_rows": calibration_rows,
            "calibration": guard.about["calibration"],
            "fit_accuracy": accuracy.get("fit"),
            "calibration_accuracy": accuracy.get("calibration"),
            "left_out": len(errors),
            "threshold": threshold.value.tolist(),
            "guarantee": threshold.guarantee,
            "cautions": fitted.cautions,
        },
        as_json,
        f"{out}: {guard.detector.label} fitted on {fit_rows:,} rows, calibrated on {calibration_rows:,} {where_from}. "
        f"{threshold.guarantee} What it promises for new data rests on this: {RULE}.",
        *([f"The model's accuracy: {', '.join(accuracies)}."] if accuracies else []),
    )
    for caution in fitted.cautions:
        options.note(f"caution: {caution}")
    if errors:
        options.note(f"{len(errors)} rows were left out, the first: {errors[0]}")
