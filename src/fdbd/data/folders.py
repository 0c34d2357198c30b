"""Image files below a folder: which are read, in which order, and what is passed over."""

from __future__ import annotations

import os
import stat
from collections import Counter
from typing import NamedTuple

from fdbd.data.images import EXTENSIONS

HIDDEN = "hidden"
OTHER_ENDING = "without the ending of an image"
NOT_REGULAR = "neither a file nor a folder"
MET_BEFORE = "a link to a folder met before"
UNREADABLE_FOLDER = "a folder that cannot be read"


class Found(NamedTuple):
    """Images below a folder."""

    names: list[str]
    """Paths below the folder, with ``/``, in the order of their parts."""
    skipped: Counter[str]
    """How many entries were passed over, by reason."""


def find_images(folder: str | os.PathLike[str]) -> Found:
    """Image files below a folder at any depth, by their ending.

    Links to folders are followed once, so that loops end. Only regular files are read: pipes and devices, which can
    block a reader for ever, are passed over like hidden entries. A link to an image that is not there is an image,
    which then cannot be read.
    """
    root = os.fspath(folder)
    names: list[str] = []
    skipped: Counter[str] = Counter()
    entered: set[tuple[int, int]] = set()  # through links or not
    walked: set[tuple[int, int]] = set()  # not through links
    pending = [("", "folder")]
    while pending:
        name, kind = pending.pop()
        if kind == "image":
            names.append(name)
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
        for entry in ordered:
            kind = _kind(entry)
            below = f"{name}/{entry.name}" if name else entry.name
            if kind in ("image", "folder", "link"):
                pending.append((below, kind))
            else:
                skipped[kind] += 1
    return Found(names, skipped)


def _kind(entry: os.DirEntry[str]) -> str:
    """``"image"``, ``"folder"``, ``"link"`` to a folder, or why the entry is passed over."""
    if entry.name.startswith("."):
        return HIDDEN
    is_image = os.path.splitext(entry.name)[1].lower() in EXTENSIONS
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link to nothing, or to itself
        return "image" if is_image else OTHER_ENDING
    if stat.S_ISDIR(mode):
        return "link" if entry.is_symlink() else "folder"
    if not stat.S_ISREG(mode):
        return NOT_REGULAR
    return "image" if is_image else OTHER_ENDING
