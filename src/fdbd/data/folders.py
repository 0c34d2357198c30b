"""Image files below a folder: which are read, in which order, and what is skipped."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.data.images import EXTENSIONS
from fdbd.data.labels import classes_by_folder

HIDDEN = "hidden"
OTHER_ENDING = "without the ending of an image"
NOT_REGULAR = "neither a file nor a folder"
MET_BEFORE = "a link to a folder met before"
UNREADABLE_FOLDER = "a folder that cannot be read"


class Found(NamedTuple):
    """Images below a folder, at least one."""

    names: list[str]  #: paths below the folder, with `/`, in the order of their parts
    classes: tuple[str, ...]
    labels: NDArray[np.int64] | None  #: by the first folder of each path, as `classes_by_folder` has them
    skipped: Counter[str]  #: how many entries were skipped, by reason


def find_images(folder: str | os.PathLike[str]) -> Found:
    """Image files below a folder at any depth, by their ending; a ValueError where there is none.

    Links to folders are followed once, so that loops end. Only regular files are read: pipes and devices, which can
    block a reader forever, are skipped like hidden entries. A link to nothing is an image that cannot be read."""
    root = os.fspath(folder)
    names: list[str] = []
    skipped: Counter[str] = Counter()
    entered: set[tuple[int, int]] = set()  # through links or not
    walked: set[tuple[int, int]] = set()  # not through links
    pending = [("", "folder")]
    while pending:
        name, kind = pending.pop()
        if kind not in ("folder", "link"):
            if kind == "image":
                names.append(name)
            else:
                skipped[kind] += 1
            continue
        path = os.path.join(root, name)
        try:
            found = os.stat(path)
            identity = (found.st_dev, found.st_ino)
            if identity in (entered if kind == "link" else walked):
                skipped[MET_BEFORE] += 1
                continue
            entered.add(identity)
            if kind == "folder":
                walked.add(identity)
            with os.scandir(path) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name, reverse=True)
        except OSError:
            if not name:
                raise
            skipped[UNREADABLE_FOLDER] += 1
            continue
        pending += [(f"{name}/{entry.name}" if name else entry.name, _kind(entry)) for entry in ordered]
    if not names:
        raise ValueError(f"{root} holds no image ({', '.join(sorted(EXTENSIONS))}){describe_skipped(skipped)}")
    return Found(names, *classes_by_folder(names), skipped)


def _kind(entry: os.DirEntry[str]) -> str:
    """``"image"``, ``"folder"``, ``"link"`` to a folder, or why the entry is skipped."""
    if entry.name.startswith("."):
        return HIDDEN
    kind = "image" if os.path.splitext(entry.name)[1].lower() in EXTENSIONS else OTHER_ENDING
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link to nothing, or to itself
        return kind
    if stat.S_ISDIR(mode):
        return "link" if entry.is_symlink() else "folder"
    return kind if stat.S_ISREG(mode) else NOT_REGULAR


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """What was skipped, for the end of a sentence; nothing where nothing was.

    >>> describe_skipped({"hidden": 3})
    '; skipped: 3 hidden'
    """
    return f"; skipped: {', '.join(f'{n:,} {why}' for why, n in skipped.items())}" if skipped else ""
