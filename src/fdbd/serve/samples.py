"""The latest rejected images as thumbnails, in memory, for the service's page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from fdbd.data.images import thumbnail
from fdbd.serve.answers import Answers


class Samples:
    """Keeps the last `size` rejected images, some kilobytes each; 0 keeps none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: deque[dict[str, Any]] = deque(maxlen=size)

    def add(self, image: bytes, answers: Answers, class_names: Sequence[str]) -> None:
        """Note a rejected image, the first row of `answers`."""
        label = int(answers.labels[0])
        self._kept.append(
            {
                "time": time.time(),
                "label": label,
                "class": class_names[label] if label < len(class_names) else None,
                "p_value": float(answers.p_values[0]),
                "image": thumbnail(image),
            }
        )

    def latest(self) -> list[dict[str, Any]]:
        """What is kept, the newest first."""
        return list(reversed(self._kept))
