"""The latest rejected images as thumbnails, in memory, for the service's page."""

from __future__ import annotations

import base64
import io
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from fdbd.data.images import decode, import_pillow
from fdbd.serve.answers import Answers

SIDE = 96
"""Pixels of a thumbnail's longer side."""


class Samples:
    """Keeps the last `size` rejected images, some kilobytes each; 0 keeps none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: deque[dict[str, Any]] = deque(maxlen=size)

    def add(self, image: bytes, answers: Answers, class_names: Sequence[str]) -> None:
        """Note a rejected image, the first row of `answers`."""
        picture = import_pillow().fromarray(decode(image))
        picture.thumbnail((SIDE, SIDE))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=70)
        label = int(answers.labels[0])
        self._kept.append(
            {
                "time": time.time(),
                "label": label,
                "class": class_names[label] if label < len(class_names) else None,
                "p_value": float(answers.p_values[0]),
                "image": "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode(),
            }
        )

    def latest(self) -> list[dict[str, Any]]:
        """What is kept, the newest first."""
        return list(reversed(self._kept))
