"""Reading a footer without pyarrow: the same numbers as pyarrow's, and no end of the process."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fdbd.data.parquet_footer import read_row_groups

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

FORGED = Path(__file__).parents[1] / "fuzz" / "corpus" / "parquet" / "histogram-too-short"


def table(rows: int, width: int):
    numbers = np.arange(rows * width, dtype=np.float32)
    fixed = pa.FixedSizeListArray.from_arrays(numbers, width)
    lists = pa.array([[float(row)] * (row % 4) for row in range(rows)])
    return pa.table({"features": fixed, "logits": lists, "name": [str(row) for row in range(rows)]})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_group_size": 7},
        {"row_group_size": 7, "version": "1.0", "compression": "none"},
        {"write_page_index": True, "write_statistics": False, "store_decimal_as_integer": True},
        {"use_dictionary": False, "write_page_checksum": True, "data_page_version": "2.0"},
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 100])
def test_rows_and_values_are_those_that_pyarrow_finds(tmp_path: Path, rows, options) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(table(rows, 3).replace_schema_metadata({"about": "ü" * 5000}), path, **options)
    footer = pq.ParquetFile(path).metadata
    expected = []
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        values = [group.column(leaf).num_values for leaf in range(group.num_columns)]
        expected.append((group.num_rows, tuple(values)))
    assert read_row_groups(path) == expected


def test_whatever_is_changed_in_a_footer_is_a_result_or_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(table(20, 3), path, row_group_size=10)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    draw = random.Random(0)
    reasons = []
    for _ in range(500):
        content = bytearray(whole)
        content[draw.randrange(len(whole) - 8 - footer, len(whole))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            read_row_groups(path)
        except ValueError as error:
            reasons.append(str(error))
    assert 50 < len(reasons) < 500
    assert all(reason.startswith("it") for reason in reasons)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"\x00" * 7 + b"PAR1", b"\xff" * 8 + b"PAR1"])
def test_what_has_no_footer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"Parquet|footer"):
        read_row_groups(path)


def test_a_footer_of_lists_within_lists_is_not_followed_for_ever(tmp_path: Path) -> None:
    # Field 9, a list of one list of one list …
    nested = b"\x99" * 100_000
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1" + nested + len(nested).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(ValueError, match="nested too deeply"):
        read_row_groups(path)


def test_a_forged_histogram_does_not_end_the_process(tmp_path: Path) -> None:
    code = f"""
from fdbd.data.features import Widths, open_features
from fdbd.data.columns import open_columns
path = {str(tmp_path / "rows.parquet")!r}
for read in (
    lambda: [list(rows.read(rows.spans(10)[0], Widths(2, 2))) for rows in [open_features(path)]],
    lambda: [columns.read(range(5), ["features"]) for columns in [open_columns(path)]],
):
    try:
        print("read", len(read()))
    except (ValueError, OSError) as error:
        print("refused", error)
"""
    (tmp_path / "rows.parquet").write_bytes(FORGED.read_bytes())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
