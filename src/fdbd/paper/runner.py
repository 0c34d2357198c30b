"""Running experiments one after the other; what is finished is kept in files and not run again."""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fdbd.bench import bundle
from fdbd.networks.zoo import list_zoo, zoo_card
from fdbd.paper import across_networks, boundary_figures, closed_form, propositions
from fdbd.paper.complexity import complexity
from fdbd.paper.detector_tables import detector_table
from fdbd.paper.experiment import Experiment, find
from fdbd.paper.finding import Finding, Record, TextTable
from fdbd.paper.models import MissingData
from fdbd.util.devices import choose_device
from fdbd.util.files import read_json, write_text
from fdbd.util.version import __version__

Program = Callable[[Finding, Any], None]
"""Fills in a finding. The second argument holds the experiment's settings, of the type that
`fdbd.paper.settings.KINDS` has for its kind."""
PROGRAMS: dict[str, Program] = {
    "detector-table": detector_table,
    "percentiles": across_networks.percentiles,
    "regularization-gain": across_networks.regularization_gain,
    "domain-shift": across_networks.domain_shift,
    "overview": boundary_figures.overview,
    "regularization": boundary_figures.regularization,
    "deviation": boundary_figures.deviation,
    "distances": boundary_figures.distances,
    "nearest-k": boundary_figures.nearest_k,
    "distance-quality": closed_form.distance_quality,
    "theorem": closed_form.theorem,
    "proposition-1": propositions.proposition_1,
    "proposition-2": propositions.proposition_2,
    "proposition-kl": propositions.proposition_kl,
    "complexity": complexity,
}
"""The program that fills in the finding of an experiment, by the `kind` that its file gives."""


def run(
    name: str,
    out: str | Path = "paper",
    scale: str = "small",
    say: Callable[[str], None] = lambda text: None,
    device: str = "auto",
) -> Record:
    """Run one experiment anew and write its files in `out`; returns what NAME.json holds. `say` is
    called with a few words on what is being done.

    Raises:
        MissingData: if nothing of it can be run here.
    """
    return _run(Finding(_find(name, scale, device), say), Path(out))


def run_all(
    names: Sequence[str],
    out: str | Path = "paper",
    scale: str = "small",
    fresh: bool = False,
    progress: bool = True,
    device: str = "auto",
) -> list[Record]:
    """Run experiments and write their files in `out`; with several, README.md lists them. Returns
    what each NAME.json holds.

    A finished experiment is not run again while its file, the features and the version are the
    same, unless `fresh`; one that lacked data is. What cannot be run at all has a record whose
    `missing` says why, and no files.
    """
    experiments = [_find(name, scale, device) for name in names]
    folder = Path(out)
    records: list[Record] = []
    bar = Progress(
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}: {task.description}"),
        console=Console(stderr=True),
        transient=True,
        disable=not progress,
    )
    with bar:
        task = bar.add_task("", total=len(experiments), name="")

        def say(text: str) -> None:
            bar.update(task, description=text)

        for experiment in experiments:
            bar.update(task, completed=len(records), name=experiment.name, description="")
            kept = None if fresh else _kept(experiment, folder)
            records.append(kept or _run_or_say_why_not(experiment, folder, say))
    if len(records) > 1 and any(record["checks"] for record in records):
        write_text(folder / "README.md", summary(records))
    return records


def _kept(experiment: Experiment, folder: Path) -> Record | None:
    """The record of an earlier run, if it is whole and nothing that it depends on has changed."""
    record: Any = read_json(folder / f"{experiment.name}.json")
    if not isinstance(record, dict) or record.get("made_from") != made_from(experiment):
        return None
    return None if record["missing"] else record


def _run_or_say_why_not(experiment: Experiment, folder: Path, say: Callable[[str], None]) -> Record:
    try:
        return _run(Finding(experiment, say), folder)
    except MissingData as error:
        return Finding(experiment, missing=[str(error)]).record()


def _find(name: str, scale: str, device: str) -> Experiment:
    # A device that does not exist is an error now, not in the middle of a run.
    choose_device(device)
    return find(name, scale, device)


def _run(finding: Finding, folder: Path) -> Record:
    start = time.perf_counter()
    experiment = finding.experiment
    PROGRAMS[experiment.kind](finding, experiment.settings)
    for entry in experiment.settings.not_tested:
        finding.leave_untested(entry.statement, entry.why)
    record = finding.record(time.perf_counter() - start, made_from(experiment))
    finding.write(record, folder)
    return record


def made_from(experiment: Experiment) -> str:
    """A digest of what a finding depends on: the experiment, the version, the features and weights
    in the package."""
    digest = hashlib.sha256(f"{__version__} {experiment.digest}".encode())
    features = sorted(bundle.FOLDER.glob("*.safetensors"))
    weights = [zoo_card(name).path for name in list_zoo()]
    for path in [*features, *weights]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def summary(records: Sequence[Record]) -> str:
    """README.md of a folder of results: one line per experiment."""
    rows = []
    missing = []
    for record in records:
        name = record["name"]
        link = f"[{name}]({name}.md)" if record["checks"] else name
        rows.append([link, record["title"], record["verdict"], f"{record['seconds']:.0f} s"])
        missing += [f"- {name}: {line}" for line in record["missing"]]
    table = TextTable("", ["experiment", "what", "verdict", "time"], rows)
    lines = ["# Results", "", table.markdown()]
    if missing:
        lines += ["Missing:", "", *missing, ""]
    return "\n".join(lines)
