"""What a record of an export says of what was verified, and no more."""

from __future__ import annotations

from pathlib import Path

from fdbd.decision.export_record import ExportRecord

FILE = (Path("guard.toy"),)


def test_a_file_that_nothing_ran_is_not_verified_whatever_its_note_says() -> None:
    assert str(ExportRecord(FILE)) == "not verified"
    assert str(ExportRecord(FILE, note="half the size")) == "not verified; half the size"
    # A runtime alone has not compared anything.
    assert not ExportRecord(FILE, "Toy 1.0").is_verified
    assert str(ExportRecord(FILE, "Toy 1.0")) == "not verified"


def test_without_a_tolerance_no_agreement_is_claimed() -> None:
    record = ExportRecord(FILE, "Toy 1.0", ("64 calibration samples",), note="1 % differ")
    said = str(record)
    assert said == "compared with torch in Toy 1.0 on 64 calibration samples; 1 % differ"
    assert "agrees" not in said


def test_with_a_tolerance_the_largest_difference_stands_beside_it() -> None:
    record = ExportRecord(FILE, "Toy 1.0", ("the example",), 1e-4, 2e-7)
    assert str(record) == (
        "verified in Toy 1.0 on 1 batch, agrees with torch to 1e-04 (largest difference 2.0e-07)"
    )
    assert "2 batches" in str(ExportRecord(FILE, "Toy 1.0", ("one", "two"), 1e-4))
