"""fdbd bench and fdbd compare: detectors on the same features, and two such results side by
side."""

from __future__ import annotations

import json
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from fdbd.commands import options
from fdbd.commands.options import JSON, answer, arg, opt, print_table

if TYPE_CHECKING:
    from fdbd.bench import Results

WRITERS = {
    "html": "to_html",
    "json": "to_json",
    "csv": "to_csv",
    "md": "to_markdown",
    "tex": "to_latex",
}
"""Methods of `Results` by format."""
Positive = Enum("Positive", {"id": "id", "ood": "ood"}, type=str)


def bench(
    config: Path | None = arg(
        None, "A .toml file; left out, the features in the package are used."
    ),
    model: str = opt(
        "imagenet-resnet50", "Which of the package's models, where there is no config."
    ),
    detectors: str | None = opt(
        None, "Comma-separated: fdbd, knn, react+energy, package.module:Class; default: all."
    ),
    positive: Positive | None = opt(
        None, "FPR convention: id (the paper's, default) or ood (OpenOOD's)."
    ),
    out: Path = opt(Path("."), "Folder for report.html and results.json."),
    formats: str = opt(
        "html,json", "Files to write: any of html,json,csv,md,tex, comma-separated.", "--format"
    ),
    latency: bool = opt(True, "Time the score stage of each detector."),
    device: str = options.DEVICE,
    autocast: bool = options.AUTOCAST,
    trust_model: bool = options.TRUST_MODEL,
    show_all: bool = opt(
        False, "Print every detector and column that fits, not only the best.", "--all"
    ),
    as_json: bool = opt(False, "Print the results as JSON instead of a table.", "--json"),
    init: Path | None = opt(None, "Write an example config there and exit."),
) -> None:
    """Compare detectors on the same features: what was found, report.html and results.json.

    Prints the best detector and its margin, where fDBD stands and what it costs, then a table. A
    config is checked as a whole before any work. `fdbd compare` compares two results.json.

    Examples: `fdbd bench`, `fdbd bench --detectors fdbd,knn,vim`, `fdbd bench --init my.toml`,
    `fdbd bench my.toml`
    """
    if init is not None:
        from fdbd.bench.config import EXAMPLE
        from fdbd.util.files import write_text

        if init.suffix != ".toml":
            raise ValueError(f"--init writes TOML, but {str(init)!r} does not end in .toml")
        if init.exists():
            raise FileExistsError(f"{str(init)!r} exists already; choose another name or remove it")
        write_text(init, EXAMPLE.read_text(encoding="utf-8"))
        typer.echo(f"wrote {init}; run: fdbd bench {init}")
        return
    suffixes, started = _names(formats), time.perf_counter()
    for name in suffixes:
        if name not in WRITERS:
            raise ValueError(f"--format has {name!r}, expected any of {', '.join(WRITERS)}")
    from fdbd.bench import Config, benchmark_of, load_bundle
    from fdbd.bench.config import detectors_from

    # Everything that can be wrong is looked at before the network runs.
    described = None if config is None else Config.from_file(config)
    named = None if detectors is None else _names(detectors)
    specs = named or (None if described is None else described.detectors)
    chosen = None if specs is None else detectors_from(specs, trust=trust_model or bool(named))
    if described is None:
        benchmark = load_bundle(model)
    else:
        import torch

        precision = torch.bfloat16 if autocast else None
        benchmark = benchmark_of(described, device=device, trust=trust_model, autocast=precision)
    if positive is not None:
        benchmark.positive = "id" if positive is Positive.id else "ood"
    options.note(
        f"{benchmark.title or 'comparing'}: each detector is fitted, scores {len(benchmark.test):,} ID and "
        f"{sum(map(len, benchmark.ood)):,} OOD samples, and is timed"
    )
    results = benchmark.run(chosen, latency=latency)
    out.mkdir(parents=True, exist_ok=True)
    written = [
        out / ("report.html" if suffix == "html" else f"results.{suffix}") for suffix in suffixes
    ]
    for suffix, path in zip(suffixes, written):
        getattr(results, WRITERS[suffix])(path)
    if as_json:
        typer.echo(json.dumps(results.to_dict()))
    else:
        _show(results, written, time.perf_counter() - started, show_all)
    for warning in benchmark.warnings if as_json else ():
        options.note(warning)
    for row in results.failures:
        options.note(f"{row.name} failed: {row.error}")
    if results.failures and not results.finished:
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    """Comma-separated names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _show(results: Results, written: list[Path], seconds: float, show_all: bool) -> None:
    """What matters first, in a few lines; then the table."""
    from fdbd.bench.text import verdict

    console = Console(highlight=False)
    for warning in results.setting.warnings:
        console.print(f"[bold red]{escape(warning)}[/]")
    if results.setting.title:
        console.print(f"[italic]{escape(results.setting.title)}[/]")
    for sentence in verdict(results):
        console.print(f"[bold]{escape(sentence.subject)}[/]{escape(sentence.rest)}")
    files = ", ".join(map(str, written))
    console.print(
        f"[bold]Written[/] {escape(files)} in {seconds:.0f} s."
        if written
        else f"[dim]{seconds:.0f} s[/]"
    )
    table = results.table(width=console.width, top=None if show_all else 5)
    table.title = None  # stands above
    console.print(table)


def compare(
    first: Path = arg(..., "A results.json of fdbd bench."),
    second: Path = arg(..., "Another."),
    as_json: bool = JSON,
) -> None:
    """Compare two results: AUROC of each detector in both, over the OOD sets that both have, and
    whether they differ.

    Where both files hold the scores of the same samples, the test is paired: two models on the same
    images, or two versions of one. Otherwise the results count as independent, and smaller
    differences go unnoticed.

    Example: `fdbd compare before/results.json after/results.json`
    """
    from fdbd.bench import Results
    from fdbd.bench.table import compare_results
    from fdbd.metrics import as_percent

    sets, found = compare_results(Results.from_json(first), Results.from_json(second))
    if as_json:
        lines = [
            {
                "detector": each.detector,
                "first": each.first.to_dict(),
                "second": each.second.to_dict(),
            }
            | {
                **each.comparison._asdict(),
                "paired": each.paired,
                "verdict": each.comparison.verdict(),
            }
            for each in found
        ]
        answer({"ood": sets, "detectors": lines}, as_json)
        return
    paired = sum(each.paired for each in found)
    how = {0: "as independent results", len(found): "paired: the samples are the same"}
    rows = []
    for each in found:
        difference, error, p_value = each.comparison
        points = f"{round(100 * difference, 2) + 0.0:+.2f} ± {100 * error:.2f}"
        verdict = each.comparison.verdict().replace("undecided", "not told apart")
        rows.append(
            [
                each.detector,
                as_percent(each.first),
                as_percent(each.second),
                points,
                f"{p_value:.2g}",
                verdict,
            ]
        )
    print_table(
        ["detector", "first", "second", "difference", "p", "second is"],
        rows,
        right=["first", "second", "difference", "p"],
        caption=f"Mean AUROC in percent over {', '.join(sets)}; difference of the second from the first ± its "
        f"standard error; verdict at the 5 % level, {how.get(paired, f'{paired} of {len(found)} paired')}.",
    )
