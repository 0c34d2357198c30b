"""Class folders of a fit and of its calibration as classes of the model: matched by name, and
compared by what the model predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.data.columns import TextRows
from fdbd.data.images import Images
from fdbd.data.labels import Agreement, as_classes, holds_indices

GAP_CHANCE = 1e-3
"""How rarely chance alone may produce a gap in accuracy for a caution to be given."""
MANY = 0.5
"""If more than this share of the images of a class are predicted as one other class, that is not
the usual kind of mistake."""


class Matched(NamedTuple):
    """Labels of images as class indices of a model."""

    labels: NDArray[np.int64] | None
    """(N,); None if the images have no labels that are classes of the model."""
    names: Mapping[str, int]
    """The class index of each name: the model's classes, and the folders that were matched."""
    cautions: list[str]
    """What to know of the match, a sentence each."""


def match_classes(
    rows: Images | TextRows,
    num_classes: int,
    class_names: Sequence[str],
    fit: Matched | None = None,
) -> Matched:
    """The labels of images or texts as class indices of a model. Names of folders, or labels of
    texts, are called folders here. The first rule that applies decides:

    1. A folder has the name of a class of the model, or of a folder of the fit: all are matched by
       name, and one with an unknown name is an error.
    2. All folders are numbers below `num_classes`: these are the class indices.
    3. These are calibration data, and the model or the fit has class names: no labels.
    4. There are as many folders as classes: the folders are the classes in order.
    5. Otherwise: no labels.

    Args:
        rows: the images or texts.
        num_classes: of the model.
        class_names: of the model, or none.
        fit: the match of the data of the fit, when these are calibration data.
    """
    known = _known_names(class_names, fit)
    folders = rows.classes
    if rows.labels is None:
        return Matched(None, known, [])
    if not folders:
        return Matched(as_classes(rows.labels, (), num_classes), known, [])

    found = _by_name(rows, known)
    if found is not None:
        return Matched(found[rows.labels], known, _missing(rows, found.tolist(), known))
    if holds_indices(folders, num_classes):
        indices = [int(folder) for folder in folders]
        names = {**known, **dict(zip(folders, indices))}
        return Matched(np.array(indices)[rows.labels], names, _missing(rows, indices, names))
    if fit is not None and known:
        first = ", ".join(folders[:3])
        said = f"the folders of {rows.source} ({first}, …) are not classes of the fit"
        return Matched(None, known, [f"{said}: its images are taken without labels"])
    if len(folders) != num_classes:
        said = f"{rows.source} has {len(folders)} class folders and the model {num_classes} classes"
        return Matched(None, known, [f"{said}: its images are taken without labels"])
    in_order = {folder: index for index, folder in enumerate(folders)}
    return Matched(rows.labels, {**known, **in_order}, _order_cautions(rows, class_names))


def _known_names(class_names: Sequence[str], fit: Matched | None) -> dict[str, int]:
    """The class index of each name of the model and of the fit."""
    known: dict[str, int] = {}
    for index, name in enumerate(class_names):
        # If two classes have the same name, as in ImageNet, the first is meant.
        known.setdefault(name, index)
    if fit is not None:
        known.update(fit.names)
    return known


def _by_name(rows: Images | TextRows, known: Mapping[str, int]) -> NDArray[np.int64] | None:
    """The class of each folder by its name; None if no name is known. ValueError if some are known
    and others are not."""
    found: list[int] = []
    unknown: list[str] = []
    for folder in rows.classes:
        place = _find(folder, known)
        if place is None:
            unknown.append(folder)
        else:
            found.append(place)
    if not found:
        return None
    if unknown:
        raise ValueError(_unknown_folders(rows, unknown, found, known))
    return np.array(found)


def _order_cautions(rows: Images | TextRows, class_names: Sequence[str]) -> list[str]:
    """A sentence if the classes have names, and the folders other ones."""
    if not class_names:
        return []
    pairs = [f"{folder} for {name}" for folder, name in zip(rows.classes[:3], class_names)]
    return [
        f"no folder of {rows.source} has the name of a class of the model: they are taken in their "
        f"order, {', '.join(pairs)}, …"
    ]


def _find(folder: str, known: Mapping[str, int]) -> int | None:
    """The class of a folder: by its very name, else by one that differs in case, or in underscores
    and hyphens for spaces."""
    if folder in known:
        return known[folder]
    for name, index in known.items():
        if _spelling(name) == _spelling(folder):
            return index
    return None


def _spelling(name: str) -> str:
    return name.casefold().replace("_", " ").replace("-", " ")


def _unknown_folders(
    rows: Images | TextRows, unknown: Sequence[str], found: Sequence[int], known: Mapping[str, int]
) -> str:
    """What is wrong with data in which some folders are classes and others are not."""
    absent = [name for name, index in known.items() if index not in found]
    what = _kind(rows)
    if len(unknown) == 1:
        said = f"{rows.source} has the {what} {_few(unknown)}, which is not a class of the model"
    else:
        said = f"{rows.source} has the {what}s {_few(unknown)}, which are not classes of the model"
    if absent:
        classes = "classes" if len(absent) > 1 else "class"
        said += f"; the {classes} {_few(absent)} {_have(absent)} no {what} there"
    return f"{said}: rename the {what}, or leave it out"


def _missing(
    rows: Images | TextRows, indices: Sequence[int], known: Mapping[str, int]
) -> list[str]:
    """A sentence if there are classes without a folder."""
    present = set(indices)
    absent: dict[int, str] = {}
    for name, index in known.items():
        if index not in present:
            absent.setdefault(index, name)
    if not absent:
        return []
    names = list(absent.values())
    classes = "class" if len(names) == 1 else f"{len(names)} classes"
    what = "folder" if isinstance(rows, Images) else "text"
    return [f"{rows.source} has no {what} for the {classes} {_few(names)}"]


def gap_caution(
    fit: Agreement | None, calibration: Agreement | None, class_names: Sequence[str]
) -> str | None:
    """One sentence if the model is right more often on one of the two sets than chance explains,
    and not as a model usually is.

    A model is better on what it was trained on: that alone says nothing. It is suspicious if the
    model is better on the calibration data than on those of the fit, or if in one of the sets most
    images of a class are predicted as one other class, and not in the other set.
    """
    if fit is None or calibration is None:
        return None
    fit_accuracy = fit.accuracy
    calibration_accuracy = calibration.accuracy
    if fit_accuracy is None or calibration_accuracy is None:
        return None
    if _chance_of_gap(fit, calibration) > GAP_CHANCE:
        return None
    if fit_accuracy < calibration_accuracy:
        worse = fit
        better = calibration
        stage = "fit"
    else:
        worse = calibration
        better = fit
        stage = "calibration"
    confusion = _odd_confusion(worse, better)
    if confusion is None and stage == "calibration":
        return None
    said = (
        f"the model is right on {fit_accuracy:.1%} of the data of the fit and on "
        f"{calibration_accuracy:.1%} of the calibration data, which chance does not explain"
    )
    if confusion is None:
        return f"{said}: are the classes of the {stage} data the model's?"
    label, predicted, count = confusion
    return (
        f"{said}: {count} of {worse.per_class[label]} images labelled {_name(label, class_names)} "
        f"in the {stage} data are predicted as {_name(predicted, class_names)}; is a class folder "
        "misnamed?"
    )


def _chance_of_gap(one: Agreement, other: Agreement) -> float:
    """How often chance alone gives two sets such different accuracies: Fisher's exact test."""
    from scipy.stats import fisher_exact

    table = [[one.right, one.count - one.right], [other.right, other.count - other.right]]
    return float(fisher_exact(table)[1])


def _odd_confusion(worse: Agreement, better: Agreement) -> tuple[int, int, int] | None:
    """The label, the prediction and the number of the most frequent mistake of `worse` that takes
    most images of a class there, and not in `better`."""
    for (label, predicted), count in worse.confusions.most_common():
        elsewhere = better.confusions[label, predicted]
        is_usual = elsewhere > MANY * better.per_class[label]
        if count > MANY * worse.per_class[label] and not is_usual:
            return label, predicted, count
    return None


def _kind(rows: Images | TextRows) -> str:
    return "class folder" if isinstance(rows, Images) else "label"


def _name(index: int, class_names: Sequence[str]) -> str:
    return repr(class_names[index]) if index < len(class_names) else str(index)


def _few(names: Sequence[str]) -> str:
    """The first of some names."""
    shown = ", ".join(repr(name) for name in names[:3])
    if len(names) > 3:
        return f"{shown} and {len(names) - 3} more"
    return shown


def _have(names: Sequence[str]) -> str:
    return "have" if len(names) > 1 else "has"
