"""fdbd bench and fdbd compare: detectors on the same features, and two such results side by
side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from fdbd.commands import options
from fdbd.commands.options import answer, arg, opt, print_table

if TYPE_CHECKING:
    from fdbd.bench import Benchmark, Config, Results
    from fdbd.bench.merging import DetectorComparison
    from fdbd.bench.runner import Contender

FORMATS = ("html", "json", "csv", "md", "tex")
Positive = Enum("Positive", {"id": "id", "ood": "ood"}, type=str)
TOP = 5
"""Detectors that are shown without --all."""


class CompareMetric(str, Enum):
    """What `fdbd compare` compares."""

    auroc = "auroc"
    joint_auroc = "joint_auroc"
    full_auroc = "full_auroc"
    aurc = "aurc"
    augrc = "augrc"


def bench(
    config: str | None = arg(
        None,
        "A .toml file; openood:cifar10, openood:cifar100, openood:imagenet200 or openood:imagenet; "
        "or a folder that --share wrote. Default: the features in the package.",
    ),
    model: str | None = opt(
        None,
        "Without a config: which of the package's models (default: imagenet-resnet50). For "
        "openood:imagenet: resnet50, vit_b_16 or swin_t.",
    ),
    detectors: str | None = opt(
        None, "Comma-separated: fdbd, knn, react+energy, package.module:Class; default: all."
    ),
    positive: Positive | None = opt(
        None, "FPR convention: id (the paper's, default) or ood (OpenOOD's)."
    ),
    metrics: str = opt(
        "auroc,fpr95",
        "Metrics of the table, comma-separated: auroc, fpr95, aupr_in, aupr_out; with labels also "
        "joint_auroc, joint_fpr95, aurc, augrc, accuracy90, accuracy80, id_aurc; with "
        "covariate-shifted sets full_auroc, full_fpr95.",
    ),
    seeds: str | None = opt(
        None, "Which of the config's seeds to run, comma-separated; default: all."
    ),
    tune: bool = opt(
        False,
        "Choose options from the config's grids on its OOD validation set, and mark these rows.",
        "--tune",
    ),
    out: Path = opt(Path("."), "Folder for report.html and results.json."),
    formats: str = opt(
        "html,json", "Files to write: any of html,json,csv,md,tex, comma-separated.", "--format"
    ),
    share: Path | None = opt(
        None, "A folder for features, head and a card, for others to run their own detectors on."
    ),
    latency: bool = opt(True, "Time the score stage of each detector."),
    device: str = options.DEVICE,
    autocast: bool = options.AUTOCAST,
    trust_model: bool = options.TRUST_MODEL,
    show_all: bool = opt(
        False, "Print every detector and column that fits, not only the best.", "--all"
    ),
    as_json: bool = opt(False, "Print the results as JSON instead of a table.", "--json"),
    init: Path | None = opt(None, "Write an example config to this file and exit."),
) -> None:
    """Compare detectors on the same features, and write report.html and results.json.

    Prints the best detector and its margin, where fDBD stands and what it costs, then a table. A
    config is checked as a whole before any work begins. `fdbd compare` compares two results.json.

    Examples: `fdbd bench`, `fdbd bench --detectors fdbd,knn,vim`, `fdbd bench --init my.toml`,
    `fdbd bench my.toml`, `fdbd bench openood:cifar10 --tune`,
    `fdbd bench my.toml --share features`, `fdbd bench features`
    """
    if init is not None:
        _write_example(init)
        return
    started = time.perf_counter()
    suffixes = _checked_names(formats, FORMATS, "--format")
    shown = _checked_metrics(metrics)
    numbers = _seed_numbers(seeds)
    # Everything that can be wrong is looked at before the network runs.
    described = _config_of(config, model)
    chosen = _detectors_of(detectors, described, trust_model)
    benchmarks = _Benchmarks(config, described, model, numbers, device, trust_model, autocast)
    benchmarks.check()
    runs = []
    for number, benchmark in enumerate(benchmarks):
        if positive is not None:
            benchmark.positive = "id" if positive is Positive.id else "ood"
        if share is not None:
            _share(benchmark, share, number, len(benchmarks))
        _announce(benchmark)
        runs.append(benchmark.run(chosen, latency=latency, tuned=tune))
    results = _together(runs, described, numbers)
    written = _write(results, out, suffixes)
    if as_json:
        typer.echo(json.dumps(results.to_dict()))
        for warning in results.setting.warnings:
            options.note(warning)
    else:
        _show(results, shown, written, time.perf_counter() - started, show_all)
    for row in results.failures:
        options.note(f"{row.name} failed: {row.error}")
    if results.failures and not results.finished:
        raise typer.Exit(1)


def _write_example(path: Path) -> None:
    """The example config, in a file of the user's choice."""
    from fdbd.bench.config import EXAMPLE
    from fdbd.util.files import write_text

    if path.suffix != ".toml":
        raise ValueError(f"--init writes TOML, but {str(path)!r} does not end in .toml")
    if path.exists():
        raise FileExistsError(f"{str(path)!r} exists already; choose another name or remove it")
    write_text(path, EXAMPLE.read_text(encoding="utf-8"))
    typer.echo(f"wrote {path}; run: fdbd bench {path}")


def _checked_names(text: str, known: Sequence[str], option: str) -> list[str]:
    names = options.names(text)
    for name in names:
        if name not in known:
            raise ValueError(f"{option} has {name!r}, expected any of {', '.join(known)}")
    return names


def _checked_metrics(text: str) -> list[str]:
    from fdbd.bench.measures import MEASURES

    names = _checked_names(text, list(MEASURES), "--metrics")
    if not names:
        raise ValueError("--metrics is empty, expected names such as auroc,fpr95")
    return names


def _seed_numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(number) for number in options.names(text)]
    except ValueError:
        raise ValueError(f"--seeds is {text!r}, expected numbers such as 0,1,2") from None


def _config_of(name: str | None, model: str | None) -> Config | None:
    """The config that was named; None for the features in the package, or in a shared folder."""
    from fdbd.bench import Config
    from fdbd.bench.openood import PREFIX, protocol

    if name is None or Path(name).is_dir():
        return None
    if name.startswith(PREFIX):
        return protocol(name, model)
    if model is not None:
        raise ValueError("--model is for the features in the package; a config names its own model")
    return Config.from_file(name)


def _detectors_of(
    text: str | None, described: Config | None, trust: bool
) -> Mapping[str, Contender] | None:
    """The detectors that were named, or those of the config; None: all."""
    from fdbd.bench.config import detectors_from

    if text is not None:
        return detectors_from(options.names(text), trust=True)
    if described is None or described.detectors is None:
        return None
    return detectors_from(described.detectors, trust=trust)


class _Benchmarks:
    """The benchmarks of a run: one, or one per seed. Each is made when it is asked for, so that
    only one is in memory."""

    def __init__(
        self,
        name: str | None,
        described: Config | None,
        model: str | None,
        seeds: list[int] | None,
        device: str,
        trust: bool,
        autocast: bool,
    ) -> None:
        self.name = name
        self.described = described
        self.model = model
        self.device = device
        self.trust = trust
        self.autocast = autocast
        self.configs = self._configs(seeds)
        self.folders = self._folders()

    def _folders(self) -> list[Path]:
        """The shared folders to read, one per run; none without such a folder."""
        from fdbd.bench.sharing import shared_folders

        if self.described is not None or self.name is None:
            return []
        return shared_folders(Path(self.name))

    def _configs(self, seeds: list[int] | None) -> list[Config]:
        if self.described is None or not self.described.seeds:
            if seeds is not None:
                raise ValueError("--seeds takes a config whose 'checkpoint' has {seed} in its path")
            return [] if self.described is None else [self.described]
        numbers = list(self.described.seeds) if seeds is None else seeds
        if not numbers:
            raise ValueError("--seeds is empty, expected numbers such as 0,1,2")
        return [self.described.for_seed(number) for number in numbers]

    def check(self) -> None:
        """A ValueError if files of the protocol are missing; a line for each of them first."""
        from fdbd.bench.openood import missing_files

        if self.described is None or not self.described.sources:
            return
        missing = missing_files(self.configs)
        for line in missing:
            options.note(f"missing: {line}")
        if missing:
            are_missing = f"{len(missing)} files of {self.name} are missing"
            if len(missing) == 1:
                are_missing = f"1 file of {self.name} is missing"
            raise ValueError(
                f"{are_missing} (above); docs/openood.md says how to get what is missing, and "
                "FDBD_DATA names the folder that holds it"
            )

    def __len__(self) -> int:
        return max(1, len(self.configs), len(self.folders))

    def __iter__(self):  # type: ignore[no-untyped-def]
        import torch

        from fdbd.bench import benchmark_of, load_bundle
        from fdbd.bench.sharing import load_shared

        if self.described is None:
            if self.folders:
                for folder in self.folders:
                    yield load_shared(folder)
            elif self.model is not None:
                yield load_bundle(self.model)
            else:
                yield load_bundle()
            return
        precision = torch.bfloat16 if self.autocast else None
        for config in self.configs:
            yield benchmark_of(config, device=self.device, trust=self.trust, autocast=precision)


def _announce(benchmark: Benchmark) -> None:
    outside = sum(len(samples) for samples in benchmark.ood)
    options.note(
        f"{benchmark.title or 'comparing'}: each detector is fitted, scores "
        f"{len(benchmark.test):,} ID and {outside:,} OOD samples, and is timed"
    )


def _share(benchmark: Benchmark, folder: Path, number: int, count: int) -> None:
    """Write the features for others; each of several runs goes to a folder of its own."""
    from fdbd.bench.sharing import run_folder, share

    target = run_folder(folder, number, count)
    share(benchmark, target)
    if number == count - 1:
        what = "features, head and card"
        if count > 1:
            what += f" of {count} runs"
        options.note(f"{what} are in {folder}; `fdbd bench {folder}` reads them")


def _together(
    runs: Sequence[Results], described: Config | None, seeds: list[int] | None
) -> Results:
    """One table of all runs; published numbers stand beside it only if all seeds ran."""
    from dataclasses import replace

    from fdbd.bench import Results

    results = runs[0] if len(runs) == 1 else Results.merge(runs)
    if described is not None and seeds is not None and set(seeds) != set(described.seeds):
        results.setting = replace(results.setting, published=None)
    return results


def _write(results: Results, folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files that were asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in suffixes:
        path = folder / f"results.{suffix}"
        if suffix == "html":
            path = folder / "report.html"
            results.to_html(path)
        elif suffix == "json":
            results.to_json(path)
        elif suffix == "csv":
            results.to_csv(path)
        elif suffix == "md":
            results.to_markdown(path)
        else:
            results.to_latex(path)
        written.append(path)
    return written


def _show(
    results: Results, metrics: Sequence[str], written: list[Path], seconds: float, show_all: bool
) -> None:
    """What matters first, in a few lines; then the table."""
    from fdbd.bench.text import collapse_line
    from fdbd.bench.verdict import verdict

    metrics = _available_metrics(results, metrics)
    console = Console(highlight=False)
    for warning in results.setting.warnings:
        console.print(f"[bold red]{escape(warning)}[/]")
    if results.setting.title:
        console.print(f"[italic]{escape(results.setting.title)}[/]")
    for sentence in verdict(results):
        console.print(f"[bold]{escape(sentence.subject)}[/]{escape(sentence.rest)}")
    if collapse_line(results):
        console.print(escape(collapse_line(results)))
    if written:
        files = ", ".join(str(path) for path in written)
        console.print(f"[bold]Written[/] {escape(files)} in {seconds:.0f} s.")
    else:
        console.print(f"[dim]{seconds:.0f} s[/]")
    table = results.table(metrics, width=console.width, top=None if show_all else TOP)
    # It stands above.
    table.title = None
    console.print(table)


def _available_metrics(results: Results, metrics: Sequence[str]) -> list[str]:
    """The metrics that the data allow, or the usual ones if these allow none; a line names the
    others."""
    from fdbd.bench.text import SHOWN

    known = [*results.metrics, *results.id_metrics]
    found = [metric for metric in metrics if metric in known]
    left_out = [metric for metric in metrics if metric not in known]
    if left_out and results.finished:
        options.note(
            f"{', '.join(left_out)} cannot be given: that takes labels of the ID samples, "
            "predictions that are right, or covariate-shifted sets; there are "
            f"{', '.join(known)}"
        )
    return found or list(SHOWN)


def compare(first: Path, second: Path, metric: CompareMetric, as_json: bool) -> None:
    """Print how two results.json differ: what `fdbd compare` does with results. AUROC does not
    depend on the FPR convention, so the two may have different ones."""
    from fdbd.bench import Results
    from fdbd.bench.measures import MEASURES
    from fdbd.bench.merging import compare_results

    results = [Results.from_json(first), Results.from_json(second)]
    for path, each in zip((first, second), results):
        if metric.value not in each.metrics:
            raise ValueError(f"{str(path)!r} has no {MEASURES[metric.value].title}")
    sets, found = compare_results(results[0], results[1], metric.value)
    if as_json:
        answer({"ood": sets, "detectors": [_as_dict(each) for each in found]}, as_json)
        return
    num_paired = sum(each.paired for each in found)
    if num_paired == len(found):
        how = "paired: the samples are the same"
    elif num_paired == 0:
        how = "as independent results"
    else:
        how = f"{num_paired} of {len(found)} paired"
    print_table(
        ["detector", "first", "second", "difference", "p", "second is"],
        [_comparison_cells(each) for each in found],
        right=["first", "second", "difference", "p"],
        caption=(
            f"Mean {MEASURES[metric.value].title} in percent over {', '.join(sets)}; difference of "
            "the second from the first ± its standard error; verdict at the 5 % level, "
            f"{how}."
        ),
    )


def _as_dict(each: DetectorComparison) -> dict[str, object]:
    comparison = each.comparison
    return {
        "detector": each.detector,
        "first": each.first.to_dict(),
        "second": each.second.to_dict(),
        "difference": comparison.difference,
        "standard_error": comparison.standard_error,
        "p_value": comparison.p_value,
        "paired": each.paired,
        "verdict": comparison.verdict(),
    }


def _comparison_cells(each: DetectorComparison) -> list[str]:
    from fdbd.metrics import as_percent

    difference = each.comparison.difference
    # No minus sign before a zero.
    points = round(100 * difference, 2) + 0.0
    verdict: str = each.comparison.verdict()
    if verdict == "undecided":
        verdict = "not told apart"
    return [
        each.detector,
        as_percent(each.first),
        as_percent(each.second),
        f"{points:+.2f} ± {100 * each.comparison.standard_error:.2f}",
        f"{each.comparison.p_value:.2g}",
        verdict,
    ]
