"""Labels as classes of a model: one rule for class folders, and a check of labels against what the
model predicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


def class_order(names: Sequence[str]) -> list[str]:
    """Class names in order: as numbers if all are integers, else as text.

    >>> class_order(["10", "9", "1"]), class_order(["10", "9", "ant"])
    (['1', '9', '10'], ['10', '9', 'ant'])
    """
    distinct = set(names)
    if _are_integers(names):
        # "1" and "01" are the same number: their text decides between them.
        return sorted(distinct, key=lambda name: (int(name), name))
    return sorted(distinct)


def classes_by_folder(names: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """Classes of files, and labels (N,), by the first folder of each path; no classes and None if a
    file lies in no folder.

    >>> classes_by_folder(["dog/1.png", "cat/x/2.png"])
    (('cat', 'dog'), array([1, 0]))
    """
    tops = [name.partition("/")[0] for name in names if "/" in name]
    if not tops or len(tops) < len(names):
        return (), None
    index = {name: number for number, name in enumerate(class_order(tops))}
    return tuple(index), np.array([index[top] for top in tops], np.int64)


def as_classes(
    labels: NDArray[np.int64] | None,
    classes: Sequence[str],
    num_classes: int,
    class_names: Sequence[str] = (),
) -> NDArray[np.int64] | None:
    """Labels (N,), which are positions in the data's `classes` if these have names, as class
    indices of a model with `num_classes` and perhaps `class_names`; None if they cannot be.

    The first of these rules that applies decides: all names are among the model's class names; all
    names are integers from 0 to C − 1, and are then the indices themselves; or there are as many as
    the model has classes, and their order (`class_order`) is the model's.

    >>> as_classes(np.array([0, 1]), ["2", "10"], 1000)
    array([ 2, 10])
    """
    if labels is None:
        return None
    found = labels
    if classes and set(classes) <= set(class_names):
        found = np.array([list(class_names).index(name) for name in classes], np.int64)[labels]
    elif holds_indices(classes, num_classes):
        found = np.array([int(name) for name in classes], np.int64)[labels]
    elif classes and len(classes) != num_classes:
        return None
    return found if ((found >= 0) & (found < num_classes)).all() else None


MANY_PER_CLASS = 20
"""With at least this many labels per class on average, a class without any is not an accident."""


class Agreement:
    """How often labels and predictions agree, with the first pairs that do not.

    >>> import torch
    >>> agreement = Agreement(10)
    >>> agreement.add(torch.arange(20) % 10, torch.zeros(20, dtype=torch.long))
    >>> agreement.accuracy, agreement.warning("photos")[:64]
    (0.1, 'accuracy on photos is 10.00 % of 20 labels, no better than guess')
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.count = 0
        self.right = 0
        self.mismatches: list[tuple[int, int]] = []
        """The first pairs of a label and another prediction."""
        self.per_class: Counter[int] = Counter()
        """The number of labels of each class that were compared."""
        self.all_labels: Counter[int] = Counter()
        """The number of labels of each class, compared or not."""
        self.confusions: Counter[tuple[int, int]] = Counter()
        """How often samples with one label are predicted as another class, by label and
        prediction."""

    def add(self, labels: Tensor, predicted: Tensor) -> None:
        """Count a batch: true and predicted class indices (N,). Labels below 0 mean none."""
        self.add_labels(labels)
        labels = labels.reshape(-1)
        predicted = predicted.reshape(-1).to(labels.device)
        is_known = labels >= 0
        labels = labels[is_known]
        predicted = predicted[is_known]
        wrong = labels != predicted
        self.per_class.update(labels.tolist())
        mistakes = list(zip(labels[wrong].tolist(), predicted[wrong].tolist()))
        self.confusions.update(mistakes)
        self.count += len(labels)
        self.right += len(labels) - len(mistakes)
        # The first three are shown as examples.
        self.mismatches = (self.mismatches + mistakes)[:3]

    def add_labels(self, labels: Tensor) -> None:
        """Count class indices (N,) alone, for `missing`. Labels below 0 mean none."""
        self.all_labels.update(labels[labels >= 0].reshape(-1).tolist())

    @property
    def accuracy(self) -> float | None:
        """A fraction; None without labels."""
        return self.right / self.count if self.count else None

    def warning(self, source: str, class_names: Sequence[str] = ()) -> str | None:
        """One sentence if the accuracy is no better than guessing, else None.

        It is no better if guesses would be right as often in more than 1 % of cases (the tail of a
        binomial) and if it gains less than a quarter of what guessing misses. Fewer than 10 labels
        prove nothing.
        """
        if self.count < 10:
            return None
        # Here, since importing it starts a thread, which a process must not have before it forks.
        from scipy.special import bdtrc

        accuracy = self.right / self.count
        chance = 1 / self.num_classes
        gains_enough = accuracy > chance + (1 - chance) / 4
        is_not_luck = bdtrc(self.right - 1, self.count, chance) < 0.01
        if gains_enough or is_not_luck:
            return None
        first = []
        for label, predicted in self.mismatches:
            wanted = _named(label, class_names)
            first.append(f"label {wanted}, predicted {_named(predicted, class_names)}")
        return (
            f"accuracy on {source} is {100 * accuracy:.2f} % of {self.count:,} labels, no better "
            "than guessing: are these the model's classes, in its order, and are images prepared "
            f"as in its training? The first mismatches: {'; '.join(first)}"
        )

    def missing(self, source: str, class_names: Sequence[str] = ()) -> str | None:
        """One sentence if classes of the model have no labels although there are many labels, else
        None.

        >>> import torch
        >>> agreement = Agreement(3)
        >>> agreement.add(torch.arange(90) % 2, torch.arange(90) % 2)
        >>> agreement.missing("the fit data")[:58]
        'the fit data have no samples of 1 of the 3 classes: 2. The'
        """
        if self.all_labels.total() < MANY_PER_CLASS * self.num_classes:
            return None
        absent = [label for label in range(self.num_classes) if not self.all_labels[label]]
        if not absent:
            return None
        shown = ", ".join(_named(label, class_names) for label in absent[:3])
        if len(absent) > 3:
            shown += f" and {len(absent) - 3} more"
        return (
            f"{source} have no samples of {len(absent)} of the {self.num_classes} classes: "
            f"{shown}. The threshold does not hold for these classes, and their samples may count "
            "as OOD; give data of all classes that are in-distribution"
        )


def _named(index: int, class_names: Sequence[str]) -> str:
    """A class in words: its index, with its name if there is one."""
    if index < len(class_names):
        return f"{index} ({class_names[index]})"
    return str(index)


def holds_indices(names: Sequence[str], num_classes: int) -> bool:
    """Whether all names are class indices of a model.

    >>> holds_indices(["0", "7"], 10), holds_indices(["0", "10"], 10), holds_indices([], 10)
    (True, False, False)
    """
    return _are_integers(names) and max(int(name) for name in names) < num_classes


def _are_integers(names: Sequence[str]) -> bool:
    return bool(names) and all(name.isascii() and name.isdecimal() for name in names)
