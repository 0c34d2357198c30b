"""A new threshold for a guard's file: the detector, the head and what the file says of its model
stay as they are, so that no network is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fdbd.core import artifact
from fdbd.decision.threshold import Threshold

_PREFIX = "threshold."


def replace_threshold(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    threshold: Threshold,
    calibration: Mapping[str, Any],
) -> None:
    """Write the guard in a file with another threshold to another file.

    Args:
        path: the guard's file.
        out: the new file.
        threshold: the new threshold.
        calibration: JSON values that say what the threshold was set on, beside its own.

    >>> import fdbd, os, tempfile, torch
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(50, 3))])
    >>> old, new = (os.path.join(tempfile.mkdtemp(), name) for name in ("old", "new"))
    >>> guard.calibrate([fdbd.Batch(torch.rand(50, 3))], tpr=0.9).save(old)
    >>> replace_threshold(old, new, Threshold.conformal(torch.rand(40), alpha=0.1), {"rows": 40})
    >>> fdbd.load(new).threshold, fdbd.load(new).version
    (Threshold(conformal, alpha=0.1, 40 calibration scores), 2)
    """
    description, tensors = artifact.read(path)
    # Whoever writes the new file says what its hash is.
    del description["sha256"]
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}
    for name, tensor in threshold.state_dict().items():
        kept[_PREFIX + name] = tensor
    about = dict(description.get("about") or {})
    about["calibration"] = {
        **threshold.to_config(),
        "promise": threshold.guarantee,
        **calibration,
    }
    description["about"] = about
    description["threshold"] = threshold.to_config()
    description["guard_version"] = description.get("guard_version", 1) + 1
    artifact.write(out, description, kept)
