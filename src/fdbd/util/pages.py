"""Parts that all pages share: one style, one way to put template, script and data together, one
range for plots of scores."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdbd.util.extras import require

OUTER = 0.005
"""The share of the scores, at either end, that a plot's range leaves out."""


def render(template: str, script: str, data: Any, images: str = "", **values: Any) -> str:
    """One self-contained page from a template with its style, script and data.

    Names of datasets, detectors and files are text wherever they stand: the template escapes all
    that it is given. The page's content security policy allows no script but its own, and no
    request, except for pictures if `images` is a directive that allows them.
    """
    jinja2 = require("jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    only = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"
    page: str = environment.get_template(template).render(
        policy=f"{only}{images}; script-src 'sha256-{digest}'",
        style=asset("style.css"),
        script=script,
        data=jinja2.utils.htmlsafe_json_dumps(data, separators=(",", ":"), allow_nan=False),
        **values,
    )
    return page


def asset(name: str) -> str:
    """The text of a file of the page."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def with_fading_edges() -> str:
    """The script of a page that has tables and nothing else that moves."""
    return asset("scroller.js") + 'document.querySelectorAll(".scroller").forEach(fadeEdge);\n'


def score_range(sets: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """The range that holds all but the outermost half percent, at either end, of each set's finite
    scores."""
    lows = []
    highs = []
    for scores in sets:
        finite = scores[np.isfinite(scores)]
        if len(finite):
            lows.append(float(np.quantile(finite, OUTER)))
            highs.append(float(np.quantile(finite, 1 - OUTER)))
    if not lows:
        return 0.0, 1.0
    low = min(lows)
    high = max(highs)
    # Scores that are all the same get a range around them, wide enough for float32 to tell its ends
    # apart.
    half = 0.5 * max(abs(low), abs(high), 1.0) * 1e-6
    if high - low > half:
        return low, high
    return low - max(half, 0.5), high + max(half, 0.5)
