"""fdbd bench: compare detectors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer


def bench(
    config: Annotated[
        Path | None, typer.Argument(help="A .toml or .yaml file; left out, the features in the package are used.")
    ] = None,
    model: Annotated[str, typer.Option(help="Which of the package's models, where there is no config.")] = "cifar10-ce",
    detectors: Annotated[
        str | None, typer.Option(help="Comma-separated names such as fdbd,knn,react+energy; default: all.")
    ] = None,
    positive: Annotated[
        str | None, typer.Option(help="FPR convention: id (the paper's, default) or ood (OpenOOD's).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html and results.json.")] = Path("."),
    formats: Annotated[
        str, typer.Option("--format", help="Files to write: any of html,json,csv,md,tex, comma-separated.")
    ] = "html,json",
    latency: Annotated[bool, typer.Option(help="Time the score stage of each detector.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
    init: Annotated[Path | None, typer.Option(help="Write an example config there and leave.")] = None,
) -> None:
    """Compare detectors on the same features: a table, report.html and results.json.

    Examples: `fdbd bench`, `fdbd bench --detectors fdbd,knn,vim`, `fdbd bench --init my.toml`, `fdbd bench my.toml`
    """
    if init is not None:
        _write_example(init)
        return
    writers = _writers(formats)
    from fdbd.bench import Config, benchmark_of, load_bundle

    started = time.perf_counter()
    if config is None:
        benchmark, chosen = load_bundle(model), None
    else:
        settings = Config.from_file(config)
        benchmark, chosen = benchmark_of(settings), settings.detectors
    if positive is not None:
        if positive not in ("id", "ood"):
            raise ValueError(f"--positive is {positive!r}, expected 'id' or 'ood'")
        benchmark.positive = positive  # type: ignore[assignment]
    if detectors is not None:
        chosen = tuple(name.strip() for name in detectors.split(",") if name.strip())
    results = benchmark.run(_known(chosen), latency=latency)
    out.mkdir(parents=True, exist_ok=True)
    written = [writers[suffix](results, out) for suffix in writers]
    if as_json:
        typer.echo(json.dumps(results.to_dict()))
    else:
        from rich.console import Console

        console = Console()
        console.print(results.table(width=console.width))
        console.print(f"[dim]{', '.join(map(str, written))} in {time.perf_counter() - started:.0f} s[/dim]")
    for row in results.failures:
        typer.echo(f"fdbd: {row.name} failed: {row.error}", err=True)
    if results.failures and not results.finished:
        raise typer.Exit(1)


def _known(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The names, each tried before anything is computed: a slip of the pen is an error at once, not a failed row."""
    from fdbd.detectors import create

    for name in names or ():
        create(name)
    return names


def _writers(formats: str):  # type: ignore[no-untyped-def]
    known = {
        "html": lambda results, out: results.to_html(out / "report.html"),
        "json": lambda results, out: results.to_json(out / "results.json"),
        "csv": lambda results, out: results.to_csv(out / "results.csv"),
        "md": lambda results, out: (results.to_markdown(out / "results.md"), out / "results.md")[1],
        "tex": lambda results, out: (results.to_latex(out / "results.tex"), out / "results.tex")[1],
    }
    chosen = [name.strip() for name in formats.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise ValueError(f"--format has {name!r}, expected any of {', '.join(known)}")
    return {name: known[name] for name in chosen}


def _write_example(path: Path) -> None:
    from fdbd.bench.config import EXAMPLE
    from fdbd.util.files import write_text

    if path.suffix != ".toml":
        raise ValueError(f"--init writes TOML, but {str(path)!r} does not end in .toml")
    if path.exists():
        raise FileExistsError(f"{str(path)!r} exists already; choose another name or remove it")
    write_text(path, EXAMPLE)
    typer.echo(f"wrote {path}; run: fdbd bench {path}")
