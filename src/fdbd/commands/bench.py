"""fdbd bench: compare detectors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdbd.commands import options

if TYPE_CHECKING:
    from fdbd.bench import Benchmark, Results
    from fdbd.bench.detector_specs import Spec

FORMATS = ("html", "json", "csv", "md", "tex")
SHORT = 5
"""Detectors in the table, and fDBD, unless all are asked for."""


class Positive(str, Enum):
    """Which side FPR95 counts as positive."""

    id = "id"
    ood = "ood"


def bench(
    config: Annotated[
        Path | None, typer.Argument(help="A .toml file; left out, the features in the package are used.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Which of the package's models, where there is no config.")
    ] = "imagenet-resnet50",
    detectors: Annotated[
        str | None,
        typer.Option(help="Comma-separated names: fdbd, knn, react+energy, package.module:Class, …; default: all."),
    ] = None,
    positive: Annotated[
        Positive | None, typer.Option(help="FPR convention: id (the paper's, default) or ood (OpenOOD's).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and results.json.")] = Path("."),
    formats: Annotated[
        str, typer.Option("--format", help="Files to write: any of html,json,csv,md,tex, comma-separated.")
    ] = "html,json",
    latency: Annotated[bool, typer.Option(help="Time the score stage of each detector.")] = True,
    device: options.Device = "auto",
    autocast: options.Autocast = False,
    trust_model: options.TrustModel = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print every detector and column that fits, not only the best.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
    init: Annotated[Path | None, typer.Option(help="Write an example config there and leave.")] = None,
) -> None:
    """Compare detectors on the same features: what was found, report.html and results.json.

    Prints the best detector and its margin, where fDBD stands and what it costs, then a table. A config is
    checked as a whole before any work. `fdbd compare` compares two results.json.

    Examples: `fdbd bench`, `fdbd bench --detectors fdbd,knn,vim`, `fdbd bench --init my.toml`, `fdbd bench my.toml`
    """
    if init is not None:
        _write_example(init)
        return
    suffixes = [name.strip() for name in formats.split(",") if name.strip()]
    for name in suffixes:
        if name not in FORMATS:
            raise ValueError(f"--format has {name!r}, expected any of {', '.join(FORMATS)}")
    started = time.perf_counter()
    given = None if detectors is None else [name.strip() for name in detectors.split(",") if name.strip()]
    benchmark, results = _run(config, model, given, positive, device, autocast, trust_model, latency)
    out.mkdir(parents=True, exist_ok=True)
    written = [_write(results, suffix, out) for suffix in suffixes]
    if as_json:
        typer.echo(json.dumps(results.to_dict()))
    else:
        _show(results, written, time.perf_counter() - started, show_all)
    for warning in benchmark.warnings if as_json else ():
        typer.echo(f"fdbd: {warning}", err=True)
    for row in results.failures:
        typer.echo(f"fdbd: {row.name} failed: {row.error}", err=True)
    if results.failures and not results.finished:
        raise typer.Exit(1)


def _run(
    path: Path | None,
    model: str,
    names: list[str] | None,
    positive: Positive | None,
    device: str | None,
    autocast: bool,
    trust: bool,
    latency: bool,
) -> tuple[Benchmark, Results]:
    """Everything that can be wrong is looked at before the network runs."""
    from fdbd.bench import Config, benchmark_of, load_bundle
    from fdbd.bench.detector_specs import detectors_from

    config = None if path is None else Config.from_file(path)
    specs: list[Spec] | None = None if config is None or config.detectors is None else list(config.detectors)
    chosen = (
        None if specs is None and names is None else detectors_from(names or specs or [], trust=trust or bool(names))
    )
    if config is None:
        benchmark = load_bundle(model)
    else:
        import torch

        precision = torch.bfloat16 if autocast else None
        benchmark = benchmark_of(config, device=device, trust=trust, autocast=precision)
    if positive is not None:
        benchmark.positive = "id" if positive is Positive.id else "ood"
    typer.echo(f"fdbd: {_about(benchmark)}", err=True)
    return benchmark, benchmark.run(chosen, latency=latency)


def _about(benchmark: Benchmark) -> str:
    """What happens next, in one line."""
    outside = sum(len(samples.features) for samples in benchmark.ood)
    return (
        f"{benchmark.title or 'comparing'}: each detector is fitted, scores {len(benchmark.test.features):,} ID and "
        f"{outside:,} OOD samples, and is timed"
    )


def _show(results: Results, written: list[Path], seconds: float, show_all: bool) -> None:
    """What matters first, in a few lines; then the table."""
    from rich.console import Console
    from rich.markup import escape

    from fdbd.results.headline import verdict

    console = Console(highlight=False)
    for warning in results.setting.warnings:
        console.print(f"[bold red]{escape(warning)}[/]")
    if results.setting.title:
        console.print(f"[italic]{escape(results.setting.title)}[/]")
    for sentence in verdict(results):
        console.print(f"[bold]{escape(sentence.subject)}[/]{escape(sentence.rest)}")
    files = ", ".join(map(str, written))
    console.print(f"[bold]Written[/] {escape(files)} in {seconds:.0f} s." if written else f"[dim]{seconds:.0f} s[/]")
    table = results.table(width=console.width, top=None if show_all else SHORT)
    table.title = None  # stands above
    console.print(table)


def _write(results: Results, suffix: str, out: Path) -> Path:
    path = out / ("report.html" if suffix == "html" else f"results.{suffix}")
    write: dict[str, Callable[[Path], object]] = {
        "html": results.to_html,
        "json": results.to_json,
        "csv": results.to_csv,
        "md": results.to_markdown,
        "tex": results.to_latex,
    }
    write[suffix](path)
    return path


def _write_example(path: Path) -> None:
    from fdbd.bench.config import EXAMPLE
    from fdbd.util.files import write_text

    if path.suffix != ".toml":
        raise ValueError(f"--init writes TOML, but {str(path)!r} does not end in .toml")
    if path.exists():
        raise FileExistsError(f"{str(path)!r} exists already; choose another name or remove it")
    write_text(path, EXAMPLE.read_text(encoding="utf-8"))
    typer.echo(f"wrote {path}; run: fdbd bench {path}")
