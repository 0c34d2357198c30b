"""Label maps of images, as PNG files: a class for each pixel. Masks of OOD pixels are written in
the same way."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import MAX_PIXELS, ImageError, Pixels, import_pillow, open_image, upright_size
from fdbd.core.preprocessing import Preprocess
from fdbd.util.files import beside

# Grey levels of a mask. What the preprocessing cuts off was not seen.
OOD = 255
ID = 0
UNSEEN = 128
_MODES = ("L", "P")


class LabelMaps:
    """Label maps of image files, found by name: that of ``a/b.jpg`` is ``a/b.png`` below the
    folder. A pixel's value, or its place in the palette, is its class; values that are not classes,
    such as 255, mean that there is none.

    Args:
        folder: of the label maps.
        images: paths of the images, below their own folder.
    """

    def __init__(self, folder: Path, images: Sequence[str]) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder of label maps at {str(folder)!r}")
        self._paths = [_below(folder, image).with_suffix(".png") for image in images]
        missing = [path for path in self._paths if not path.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{len(missing)} of {len(images)} images have no label map, the first "
                f"{str(missing[0])!r}: expected a .png of the image's name"
            )

    def read(self, row: int, preprocess: Preprocess) -> NDArray[np.int64]:
        """(size, size) classes of the pixels of one image as the model takes it."""
        path = self._paths[row]
        with open_image(path, formats=("PNG",)) as image:
            if image.mode not in _MODES:
                raise ImageError(
                    f"{path} has pixels of mode {image.mode}, expected 8-bit grey levels or a "
                    "palette, whose numbers are classes"
                )
            height, width = upright_size(image)
            if height * width > MAX_PIXELS:
                raise ImageError(
                    f"{path} has {width} × {height} pixels, more than the limit of {MAX_PIXELS:,}"
                )
            try:
                classes = np.array(image, dtype=np.uint8)
            except (OSError, ValueError, SyntaxError) as error:
                raise ImageError(f"{path} is not a readable image ({error})") from None
        # Classes between two others would be wrong: each pixel takes that of the nearest.
        nearest = replace(preprocess, interpolation="nearest")
        fitted = nearest.fit(np.repeat(classes[:, :, None], 3, axis=2))
        return fitted[:, :, 0].astype(np.int64)


class MaskFolder:
    """Masks of OOD pixels as PNG files, one for each image, of the image's own size: 255 is OOD, 0
    is in-distribution, and 128 was cut off before the network.

    Args:
        folder: created if it is missing; its parent must exist.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"--masks is {str(folder)!r}, a file; expected a folder")
        if not folder.absolute().parent.is_dir():
            raise FileNotFoundError(
                f"the folder {str(folder.parent)!r} does not exist; create it first"
            )
        self.folder = folder

    def write(self, name: str, mask: Pixels) -> None:
        """Write the mask of the image of this name."""
        path = mask_path(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as draft:
            draft.write_bytes(as_png(mask))


def mask_path(folder: Path, name: str) -> Path:
    """Where the mask of an image is: ``a/b.jpg.png`` for ``a/b.jpg``, so that images that differ
    in their ending alone have masks of their own."""
    return _below(folder, f"{name}.png")


def _below(folder: Path, name: str) -> Path:
    """The path of this name below the folder, also for the whole path of an image that lies
    elsewhere.

    >>> _below(Path("masks"), "/data/../a.png").as_posix()
    'masks/data/a.png'
    """
    path = Path(name)
    parts = [part for part in path.parts if part not in (path.anchor, "..")]
    return folder.joinpath(*parts)


def mask_of(is_ood: NDArray[np.bool_], preprocess: Preprocess, height: int, width: int) -> Pixels:
    """The mask (height, width) of an image, from the verdicts (h, w) on its positions."""
    levels = np.where(is_ood, OOD, ID).astype(np.uint8)
    return preprocess.unfit(levels, height, width, UNSEEN)


def as_png(mask: Pixels) -> bytes:
    """A mask (H, W) as a PNG of grey levels."""
    buffer = io.BytesIO()
    import_pillow().fromarray(mask).save(buffer, "PNG")
    return buffer.getvalue()


def read_mask(path: Path) -> Pixels:
    """A mask (H, W) that `MaskFolder` wrote."""
    with open_image(path, formats=("PNG",)) as image:
        height, width = upright_size(image)
        if image.mode != "L" or height * width > MAX_PIXELS:
            raise ImageError(f"{path} is not a mask that fdbd score wrote")
        try:
            return np.array(image, dtype=np.uint8)
        except (OSError, ValueError, SyntaxError) as error:
            raise ImageError(f"{path} is not a readable image ({error})") from None


def overlaid(image: Pixels, mask: Pixels) -> Pixels:
    """An image (H, W, 3) whose OOD pixels are tinted orange, and whose unseen ones are darker."""
    if image.shape[:2] != mask.shape:
        raise ValueError(
            f"the image has {image.shape[1]} × {image.shape[0]} pixels, its mask "
            f"{mask.shape[1]} × {mask.shape[0]}"
        )
    shown = image.astype(np.float32)
    orange = np.array([255, 120, 0], np.float32)
    is_ood = mask == OOD
    shown[is_ood] = 0.45 * shown[is_ood] + 0.55 * orange
    shown[mask == UNSEEN] *= 0.5
    return np.asarray(shown.round().astype(np.uint8))
