"""What an export wrote, and what was verified of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ExportRecord:
    """What an export wrote, and how far its answers were compared with torch's. The record may
    stand for the path of its first file in `open` and similar calls.

    >>> record = ExportRecord(files=(Path("guard.toy"),))
    >>> record.is_verified, str(record)
    (False, 'not verified')
    """

    files: tuple[Path, ...]
    """The first is the one to open."""
    runtime: str | None = None
    """What ran the file, with its version; None: nothing did."""
    trials: tuple[str, ...] = ()
    """The inputs on which the answers were compared with torch's."""
    tolerance: float | None = None
    """The largest difference to torch that was accepted, relative for numbers above 1."""
    largest_difference: float | None = None
    """The largest difference to torch that was found."""
    details: Mapping[str, object] = field(default_factory=dict)
    """What else was measured, such as what 8 bits did; JSON values."""
    note: str = ""
    """The details in words."""

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.files[0]

    @property
    def is_verified(self) -> bool:
        """Whether a runtime has run the file and its answers were compared with torch's."""
        return self.runtime is not None and bool(self.trials)

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        if not self.is_verified:
            said = "not verified"
        elif self.tolerance is None:
            # Answers were compared, and no limit was set to how far each may be from torch's.
            said = f"compared with torch in {self.runtime} on {', '.join(self.trials)}"
        else:
            said = (
                f"verified in {self.runtime} on {_batches(len(self.trials))}, agrees with torch to "
                f"{self.tolerance:.0e}"
            )
        if self.is_verified and self.largest_difference is not None:
            said += f" (largest difference {self.largest_difference:.1e})"
        if self.note:
            said += f"; {self.note}"
        return said

    def to_dict(self) -> dict[str, object]:
        """The record as JSON values."""
        return {
            "files": [str(file) for file in self.files],
            "verified": self.is_verified,
            "runtime": self.runtime,
            "trials": list(self.trials),
            "tolerance": self.tolerance,
            "largest_difference": self.largest_difference,
            "note": self.note,
            **self.details,
        }


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"
