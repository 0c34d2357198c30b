"""Running experiments one after the other; what is finished is kept in files and not run again."""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fdbd.bench import bundle
from fdbd.networks.by_name import list_zoo, zoo_card
from fdbd.paper import across_networks, boundary_figures, closed_form, propositions
from fdbd.paper.complexity import complexity
from fdbd.paper.detector_tables import detector_table
from fdbd.paper.experiment import Experiment, find
from fdbd.paper.models import MissingData
from fdbd.paper.result import Record, Result, Table
from fdbd.util.devices import choose_device
from fdbd.util.files import read_json, write_text
from fdbd.util.version import __version__

PROGRAMS: dict[str, Callable[[Result], None]] = {
    "detector-table": detector_table,
    "percentiles": across_networks.percentiles,
    "regularization-gain": across_networks.regularization_gain,
    "domain-shift": across_networks.domain_shift,
    "overview": boundary_figures.overview,
    "regularization": boundary_figures.regularization,
    "deviation": boundary_figures.deviation,
    "distances": boundary_figures.distances,
    "nearest-k": boundary_figures.nearest_k,
    "distance-quality": closed_form.closed_form,
    "theorem": closed_form.theorem,
    "proposition-1": propositions.proposition_1,
    "proposition-2": propositions.proposition_2,
    "proposition-kl": propositions.proposition_kl,
    "complexity": complexity,
}
"""What fills in the result of an experiment, by the `kind` that its file gives."""


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
        MissingData: when nothing of it can be run here.
    """
    return _run(Result(_find(name, scale, device), say), Path(out))


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
    experiments, folder = [_find(name, scale, device) for name in names], Path(out)
    records: list[Record] = []
    words = "{task.fields[name]}: {task.description}"
    columns = BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn(words)
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not progress
    ) as bar:
        task = bar.add_task("", total=len(experiments), name="")
        for experiment in experiments:
            bar.update(task, completed=len(records), name=experiment.name, description="")
            result = Result(experiment, lambda text: bar.update(task, description=text))
            kept: Any = None if fresh else read_json(folder / f"{experiment.name}.json")
            is_same = isinstance(kept, dict) and kept.get("made_from") == made_from(experiment)
            try:
                records.append(kept if is_same and not kept["missing"] else _run(result, folder))
            except MissingData as error:
                records.append(Result(experiment, missing=[str(error)]).record())
    if len(records) > 1 and any(record["checks"] for record in records):
        write_text(folder / "README.md", summary(records))
    return records


def _find(name: str, scale: str, device: str) -> Experiment:
    choose_device(device)  # an error now rather than in the middle
    experiment = find(name, scale, device)
    if experiment.kind not in PROGRAMS:
        raise ValueError(
            f"{experiment.name}: kind is {experiment.kind!r}, expected one of {', '.join(PROGRAMS)}"
        )
    return experiment


def _run(result: Result, folder: Path) -> Record:
    start = time.perf_counter()
    PROGRAMS[result.experiment.kind](result)
    record = result.record(time.perf_counter() - start, made_from(result.experiment))
    result.write(record, folder)
    return record


def made_from(experiment: Experiment) -> str:
    """A digest of what a result depends on: the experiment, the version, the features and weights
    in the package."""
    digest = hashlib.sha256(f"{__version__} {experiment.digest}".encode())
    for path in [
        *sorted(bundle.FOLDER.glob("*.safetensors")),
        *(zoo_card(name).path for name in list_zoo()),
    ]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def summary(records: Sequence[Record]) -> str:
    """README.md of a folder of results: one line per experiment."""
    links = [f"[{r['name']}]({r['name']}.md)" if r["checks"] else r["name"] for r in records]
    rows = [
        [link, r["title"], r["verdict"], f"{r['seconds']:.0f} s"] for link, r in zip(links, records)
    ]
    lines = ["# Results", "", Table("", ["experiment", "what", "verdict", "time"], rows).markdown()]
    missing = [f"- {record['name']}: {line}" for record in records for line in record["missing"]]
    return "\n".join([*lines, *(["Missing:", "", *missing, ""] if missing else [])])
