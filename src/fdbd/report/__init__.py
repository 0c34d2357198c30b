"""The report of a benchmark: one self-contained HTML page, and the figures that need features and not only scores."""

from .figures import deviation_profile, figures, sample_standings
from .page import html

__all__ = ["deviation_profile", "figures", "html", "sample_standings"]
