"""fdbd fit: fit and calibrate a guard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdbd.commands import model_and_data, options
from fdbd.commands.options import opt

if TYPE_CHECKING:
    from fdbd.decision.choice import Auto
    from fdbd.decision.guard import Guard
    from fdbd.jobs.fitting import Fitted

HELD_OUT = (
    "With auto: data to weigh detectors by, some 300 samples that neither the network's training "
    "nor the fit has seen; default: a part of the calibration data, 300 or one half."
)
NEVER_SAW = (
    "Confirm that the network was not trained on DATA; without --calibration, a part of DATA then "
    "sets the threshold."
)


def fit(
    sources: list[str] = model_and_data.SOURCES,
    out: Path = opt(Path("guard.safetensors"), "The guard's file."),
    checkpoint: Path | None = model_and_data.CHECKPOINT,
    num_classes: int | None = model_and_data.NUM_CLASSES,
    head: str | None = model_and_data.HEAD,
    preprocess: str | None = model_and_data.PREPROCESS,
    detector: str = opt(
        "fdbd",
        "A detector's name, such as fdbd, knn, react+energy; auto chooses and weighs detectors by "
        "itself (experimental).",
    ),
    budget: str | None = opt(
        None, "With auto: what detectors may cost, such as '200us, 10MB, no bank'."
    ),
    held_out: str | None = opt(None, HELD_OUT),
    shaping: str | None = opt(
        None, "An activation shaping to put before the detector: react, ash-s, scale, …"
    ),
    tpr: float | None = opt(
        None, "Share of the calibration data to accept; default: 0.95, unless --alpha is given."
    ),
    alpha: float | None = opt(
        None, "Instead of --tpr: the largest share of false alarms (conformal)."
    ),
    per_class: bool = opt(False, "A threshold for each predicted class.", "--per-class"),
    calibration: str | None = opt(
        None, "Data for the threshold, seen by neither the network's training nor the fit."
    ),
    network_never_saw_data: bool = opt(False, NEVER_SAW, "--network-never-saw-data"),
    holdout: float | None = opt(
        None, "With --network-never-saw-data: the share of DATA to calibrate on; default: 0.2."
    ),
    text: str | None = opt(None, "The column of texts in a .csv, .jsonl or .parquet file."),
    label: str | None = opt(None, "The column of the texts' labels."),
    label_maps: Path | None = opt(
        None, "For a model that predicts maps: a folder with the label map of each image, as .png."
    ),
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
    `fdbd fit cifar10-ce ./train --calibration ./fresh --detector auto --held-out ./other`,
    `fdbd fit train.parquet --head head.npz --calibration fresh.parquet`,
    `fdbd fit hf:./intents train.csv --text query --label intent --calibration fresh.csv`,
    `fdbd fit sentences:all-MiniLM-L6-v2 train.csv --text query --label intent --alpha 0.05`,
    `fdbd fit public:deeplab-voc ./photos --calibration ./fresh --alpha 0.05`
    """
    from fdbd.decision.threshold import Target
    from fdbd.jobs.fitting import fit_files
    from fdbd.jobs.scoring import Engine
    from fdbd.jobs.sentences import fit_sentences
    from fdbd.networks.sentence_model import sentence_transformer
    from fdbd.util.files import check_place

    if ":" in detector:
        raise ValueError(
            f"--detector is {detector!r}, but a guard's file cannot name code: a detector of your "
            f"own is compared with fdbd bench --detectors {detector}, and fitted in Python with "
            "fdbd.Guard(model, detector)"
        )
    check_place(out)
    where = Engine(engine.value, address, device, batch_size, workers)
    named = f"{shaping}+{detector}" if shaping else detector
    target = Target(tpr=tpr, alpha=alpha, per_class=per_class)
    encoder = _sentence_encoder(sources, head)
    if encoder is not None:
        if holdout is not None and calibration is not None:
            raise ValueError(
                "--holdout is a share of DATA to calibrate on: leave --calibration out"
            )
        fitted = fit_sentences(
            sentence_transformer(encoder),
            sources[1],
            calibration,
            where,
            holdout=holdout,
            detector=_detector(named, budget),
            text=text,
            label=label,
            **target,
        )
    else:
        share = _holdout(holdout, network_never_saw_data, calibration)
        given = model_and_data.read(
            "fit",
            sources,
            checkpoint,
            num_classes=num_classes,
            head=head,
            preprocess=preprocess,
            trust=trust_model,
            device=where.home,
        )
        fitted = fit_files(
            given.source,
            given.data,
            calibration,
            where,
            holdout=share,
            held_out=held_out,
            head=given.layer,
            detector=_detector(named, budget),
            autocast=autocast,
            text=text,
            label=label,
            label_maps=label_maps,
            **target,
        )
    fitted.guard.save(out)
    _report(fitted, out, calibration, held_out, as_json)


def _sentence_encoder(sources: list[str], head: str | None) -> str | None:
    """The sentence encoder whose classes are to be learned; None: the model is another one."""
    from fdbd.networks.by_name import SENTENCES

    model, _ = model_and_data.names("fit", sources, head)
    source, _, encoder = (model or "").partition(":")
    return encoder if source == SENTENCES else None


def _names_sentence_encoder(guard: Guard) -> bool:
    """Whether the guard's classifier was fitted by this command."""
    from fdbd.networks.by_name import SENTENCES

    origin: Any = guard.about.get("model") or {}
    return str(origin.get("name")).startswith(f"{SENTENCES}:")


def _detector(name: str, budget: str | None) -> str | Auto:
    """The detector's name, or the options of "auto"."""
    from fdbd.decision.choice import Auto

    if budget is None:
        return name
    if name != "auto":
        raise ValueError(f"--budget is for --detector auto, and the detector is {name}")
    return Auto(budget=budget)


def _holdout(
    holdout: float | None, network_never_saw_data: bool, calibration: str | None
) -> float | None:
    """The share of DATA to calibrate on; None if other data are given, or none may be taken."""
    from fdbd.jobs.fitting import HOLDOUT

    may_hold_out = network_never_saw_data and calibration is None
    if holdout is not None and not may_hold_out:
        raise ValueError(
            "--holdout is a share of DATA to calibrate on: it goes with --network-never-saw-data "
            "alone"
        )
    if may_hold_out and holdout is None:
        return HOLDOUT
    return holdout


def _report(
    fitted: Fitted, out: Path, calibration: str | None, held_out: str | None, as_json: bool
) -> None:
    """What was fitted and calibrated, and what to know of it."""
    errors = [*fitted.training.errors, *fitted.calibrating.errors]
    if as_json:
        options.answer(_facts(fitted, out, len(errors)), as_json)
    else:
        _say_what_was_fitted(fitted, out, calibration)
        _say_what_was_chosen(fitted.guard, held_out)
        _say_accuracy(fitted.guard)
    for caution in fitted.cautions:
        options.note(f"caution: {caution}")
    if errors:
        options.note(f"{len(errors)} rows were left out, the first: {errors[0]}")


def _facts(fitted: Fitted, out: Path, left_out: int) -> dict[str, object]:
    """The answer as JSON values."""
    guard = fitted.guard
    threshold = guard.stages.require_any_threshold()
    accuracy = _accuracy(guard)
    choice = None
    if guard.choice is not None:
        choice = guard.choice.to_dict()
    return {
        "guard": str(out),
        "id": guard.id,
        "detector": guard.detector.label,
        "fit_rows": fitted.training.num_given,
        "calibration_rows": fitted.calibrating.num_given,
        "calibration": guard.about["calibration"],
        "fit_accuracy": accuracy.get("fit"),
        "calibration_accuracy": accuracy.get("calibration"),
        "left_out": left_out,
        "threshold": threshold.value.tolist(),
        "guarantee": threshold.guarantee,
        "cautions": fitted.cautions,
        "choice": choice,
    }


def _accuracy(guard: Guard) -> dict[str, float | None]:
    """The model's accuracy on the data of each stage; None if these have no labels."""
    agreement = guard.stages.record.agreement
    return {stage: found.accuracy for stage, found in agreement.items()}


def _say_what_was_fitted(fitted: Fitted, out: Path, calibration: str | None) -> None:
    from fdbd.jobs.fitting import RULE

    guard = fitted.guard
    if calibration is not None:
        where_from = f"of {calibration}"
    elif _names_sentence_encoder(guard):
        where_from = "held out, which the classifier was fitted without"
    else:
        where_from = "held out, which you confirmed the network never saw"
    options.say(
        f"{out}: {guard.detector.label} fitted on {fitted.training.num_given:,} rows, calibrated "
        f"on {fitted.calibrating.num_given:,} {where_from}. "
        f"{guard.stages.require_any_threshold().guarantee} "
        f"What it promises for new data rests on this: {RULE}."
    )


def _say_what_was_chosen(guard: Guard, held_out: str | None) -> None:
    """With "auto", how the detectors were weighed, and which were kept."""
    choice = guard.choice
    if choice is None:
        return
    source = "of the calibration rows" if held_out is None else f"rows of {held_out}"
    number = len(choice.members)
    taken = f"combined {number} detectors with equal weights, calibrated on"
    if choice.is_weighed:
        taken = f"weighed {number} detectors by"
    options.say(f"auto (experimental) {taken} {choice.num_held_out} {source}: {choice.summary}.")


def _say_accuracy(guard: Guard) -> None:
    known = []
    for stage, value in _accuracy(guard).items():
        if value is not None:
            known.append(f"{value:.2%} on the {stage} data")
    if known:
        options.say(f"The model's accuracy: {', '.join(known)}.")
