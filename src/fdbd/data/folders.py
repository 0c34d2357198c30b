"""Image files below a folder: which are read, in which order, and what is skipped."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fdbd.data.images import EXTENSIONS, ImageFiles, Images
from fdbd.data.labels import classes_by_folder


def find_images(folder: str | os.PathLike[str]) -> Images:
    """Image files below a folder at any depth, by their ending, in the order of the parts of their paths, with the
    classes of `classes_by_folder`; a ValueError where there is none.

    Each folder is read once, links to folders after the others, so that loops end. Only regular files are read: pipes
    and devices, which can block a reader forever, are skipped like hidden entries. A link to nothing is an image that
    cannot be read."""
    root = os.fspath(folder)
    skipped: Counter[str] = Counter()
    met: set[tuple[int, int]] = set()
    piles: dict[str, list[str]] = {"image": [], "folder": [""], "link": []}  # paths below the root
    while piles["folder"] or piles["link"]:
        name = (piles["folder"] or piles["link"]).pop()
        path = os.path.join(root, name)
        try:
            found = os.stat(path)
            if (found.st_dev, found.st_ino) in met:
                skipped["a link to a folder met before"] += 1
                continue
            met.add((found.st_dev, found.st_ino))
            with os.scandir(path) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name, reverse=True)
        except OSError:
            if not name:
                raise
            skipped["a folder that cannot be read"] += 1
            continue
        for entry in ordered:
            kind = _kind(entry)
            if kind in piles:
                piles[kind].append(f"{name}/{entry.name}" if name else entry.name)
            else:
                skipped[kind] += 1
    if not (names := sorted(piles["image"], key=lambda name: name.split("/"))):
        raise ValueError(f"{root} holds no image ({', '.join(sorted(EXTENSIONS))}){describe_skipped(skipped)}")
    classes, labels = classes_by_folder(names)
    return Images(ImageFiles(names, folder=root), labels, classes, Path(root).name, root, skipped=skipped)


def _kind(entry: os.DirEntry[str]) -> str:
    """``"image"``, ``"folder"``, ``"link"`` to a folder, or why the entry is skipped."""
    if entry.name.startswith("."):
        return "hidden"
    is_image = os.path.splitext(entry.name)[1].lower() in EXTENSIONS
    kind = "image" if is_image else "without the ending of an image"
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link to nothing, or to itself
        return kind
    if stat.S_ISDIR(mode):
        return "link" if entry.is_symlink() else "folder"
    return kind if stat.S_ISREG(mode) else "neither a file nor a folder"


def describe_skipped(skipped: Mapping[str, int]) -> str:
    """What was skipped, for the end of a sentence; nothing where nothing was.

    >>> describe_skipped({"hidden": 3})
    '; skipped: 3 hidden'
    """
    return f"; skipped: {', '.join(f'{n:,} {why}' for why, n in skipped.items())}" if skipped else ""
