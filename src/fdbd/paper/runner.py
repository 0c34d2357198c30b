"""Running experiments: one, or all with one progress display; files of what is finished, kept for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fdbd.paper.experiment import Experiment, find
from fdbd.paper.finding import Finding, verdict, write
from fdbd.paper.kinds import Say, run_kind
from fdbd.paper.subject import MissingData
from fdbd.util.files import write_text


def run(name: str, out: str | Path = "paper", scale: str = "small", say: Say = lambda text: None) -> dict[str, Any]:
    """Run one experiment and write its files in `out`; returns what NAME.json holds.

    Raises:
        MissingData: when nothing of it can be run here.
    """
    return _run(find(name, scale), Path(out), say)


def run_all(
    names: Sequence[str], out: str | Path = "paper", scale: str = "small", fresh: bool = False, progress: bool = True
) -> list[dict[str, Any]]:
    """Run experiments one after the other under one progress display; several also write README.md.

    A finished experiment is not run again while its file, the features and the version are the same; one that lacked
    data is. What cannot be run at all is a record whose `missing` says why.

    Args:
        names: of experiments.
        out: folder of the results.
        scale: "small" or "paper".
        fresh: run everything again.
        progress: show the display.
    """
    folder = Path(out)
    experiments = [find(name, scale) for name in names]
    records = []
    with _display(len(experiments), progress) as show:
        for number, experiment in enumerate(experiments):
            show(number, experiment.name)
            record = None if fresh else _kept(experiment, folder)
            if record is None:
                record = _run_or_say(experiment, folder, partial(_tell, show, number, experiment.name))
            records.append(record)
    if len(records) > 1:
        from fdbd.paper.page import summary

        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "README.md", summary(records))
    return records


def _tell(show: Any, number: int, name: str, text: str) -> None:
    show(number, f"{name}: {text}")


def _run(experiment: Experiment, folder: Path, say: Say) -> dict[str, Any]:
    start = time.perf_counter()
    finding = run_kind(experiment, say)
    record = {**finding.to_dict(experiment, time.perf_counter() - start), "made_from": made_from(experiment)}
    record["verdict"] = verdict(record)
    write(finding, record, folder)
    return record


def _run_or_say(experiment: Experiment, folder: Path, say: Say) -> dict[str, Any]:
    try:
        return _run(experiment, folder, say)
    except MissingData as error:
        record = Finding(missing=[str(error)]).to_dict(experiment, 0.0)
        return {**record, "verdict": "not run"}


def _kept(experiment: Experiment, folder: Path) -> dict[str, Any] | None:
    """The record of a finished run of the same thing."""
    try:
        record: dict[str, Any] = json.loads((folder / f"{experiment.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("made_from") == made_from(experiment) and not record.get("missing") else None


def made_from(experiment: Experiment) -> str:
    """A digest of what a result depends on: the experiment, the version, the features and weights in the package."""
    from fdbd import __version__
    from fdbd.bench import bundle
    from fdbd.networks.zoo import list_zoo, zoo_card

    digest = hashlib.sha256(f"{__version__} {experiment.digest}".encode())
    for path in [*sorted(bundle.FOLDER.glob("*.safetensors")), *(zoo_card(name).path for name in list_zoo())]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextlib.contextmanager
def _display(total: int, enabled: bool) -> Iterator[Any]:
    """One bar over the experiments, with what is being done beside it."""
    if not enabled:
        yield lambda done, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)
