"""Files that appear whole or not at all, locks, and drafts of killed runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fdbd.util import files


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with contextlib.suppress(RuntimeError), files.beside(path) as draft:
        draft.write_bytes(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with files.beside(path) as draft:
        draft.write_bytes(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_its_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(number: int) -> None:
        done.append("folder" if os.path.samestat(os.fstat(number), os.stat(tmp_path)) else "file")
        sync(number)

    def rename(*paths: str) -> None:
        done.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    files.write_text(tmp_path / "a.txt", "whole")
    assert done == ["file", "rename", "folder"]


def test_a_folder_in_the_place_of_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder, and the output is a file"):
        files.write_text(tmp_path / "a.txt", "")
    with pytest.raises(FileNotFoundError, match="does not exist; create it first"):
        files.write_text(tmp_path / "b" / "a.txt", "")


def test_a_folder_appears_whole_and_the_first_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "set"
    with files.atomic_folder(target) as first:
        (first / "who").write_text("first")
        with files.atomic_folder(target) as second:
            (second / "who").write_text("second")
    assert (target / "who").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_old_drafts_of_killed_runs_are_removed_and_young_ones_stay(tmp_path: Path) -> None:
    target = tmp_path / "monitor.safetensors"
    old, young, other = (
        tmp_path / f".{token}.{name}"
        for token, name in (
            ("0badcafe", target.name),
            ("1badcafe", target.name),
            ("2badcafe", "other.safetensors"),
        )
    )
    for path in (old, young, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    files.remove_drafts(target)
    assert [path.exists() for path in (old, young, other)] == [False, True, True]


def test_a_lock_is_exclusive_and_falls_with_its_process(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, time; from pathlib import Path\n"
        "lock = runpy.run_path(sys.argv[2])['lock']\n"
        "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock"), files.__file__],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with files.lock(tmp_path / "lock", wait=False) as is_held:
            assert is_held is False
    finally:
        process.kill()
        process.wait()
    with files.lock(tmp_path / "lock", wait=False) as is_held:
        assert is_held


def test_a_second_lock_of_the_same_process_has_to_wait_too(tmp_path: Path) -> None:
    with files.lock(tmp_path / "lock"), files.lock(tmp_path / "lock", wait=False) as is_held:
        assert is_held is False
    with files.lock(tmp_path / "lock", wait=False) as is_held:
        assert is_held


def test_deep_brackets_are_json_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert files.read_json(tmp_path / "deep.json") is None


def test_another_machine_takes_a_copy_for_the_same_file_and_notices_another(tmp_path, monkeypatch):
    file = tmp_path / "data"
    file.write_bytes(b"first")
    known = files.stamp(file)
    files.check_unchanged(file, known)
    copy = tmp_path / "copy"
    shutil.copy2(file, copy)
    # Another inode.
    os.replace(copy, file)
    with pytest.raises(ValueError, match="changed or replaced"):
        files.check_unchanged(file, known)
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    files.check_unchanged(file, known)
    file.write_bytes(b"other")
    with pytest.raises(ValueError, match="changed or replaced"):
        files.check_unchanged(file, known)
