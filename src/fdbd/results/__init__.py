"""What a benchmark found: rows of evaluations, how they compare, and the formats that need no report."""

from fdbd.results.rows import ALL, METRICS, SMALLER_IS_BETTER, Latency, Row, Setting
from fdbd.results.table import ResultTable

__all__ = ["ALL", "METRICS", "SMALLER_IS_BETTER", "Latency", "ResultTable", "Row", "Setting"]
