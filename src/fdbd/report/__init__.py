"""The report of a benchmark: one self-contained HTML page, and the figures that need features and not only scores."""

from fdbd.report.figures import deviation_profile, figures, sample_standings
from fdbd.report.page import html

__all__ = ["deviation_profile", "figures", "html", "sample_standings"]
