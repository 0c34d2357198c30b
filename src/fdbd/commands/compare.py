"""fdbd compare: two results of fdbd bench side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def compare(
    first: Annotated[Path, typer.Argument(help="A results.json of fdbd bench.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two results: AUROC of each detector in both, over the OOD sets that both have, and whether they differ.

    Where both files hold the scores of the same samples, the test is paired: two models on the same images, or two
    versions of one. Elsewhere the results count as independent, which tells less apart.

    Example: `fdbd compare before/results.json after/results.json`
    """
    from fdbd.bench import Results
    from fdbd.results.comparing import compare_results

    sets, found = compare_results(Results.from_json(first), Results.from_json(second))
    if as_json:
        lines = [
            {
                "detector": each.detector,
                "first": each.first.to_dict(),
                "second": each.second.to_dict(),
                **each.comparison._asdict(),
                "paired": each.paired,
                "verdict": each.comparison.verdict(),
            }
            for each in found
        ]
        typer.echo(json.dumps({"ood": sets, "detectors": lines}))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fdbd.metrics import as_percent

    paired = sum(each.paired for each in found)
    how = {0: "as independent results", len(found): "paired: the samples are the same"}
    table = Table(
        caption=f"Mean AUROC in percent over {escape(', '.join(sets))}; difference of the second from the first ± its "
        f"standard error; verdict at the 5 % level, {how.get(paired, f'{paired} of {len(found)} paired')}.",
        caption_justify="left",
    )
    table.add_column("detector", no_wrap=True)
    for title in ("first", "second", "difference", "p"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("second is")
    for each in found:
        difference, error, p_value = each.comparison
        cells = [
            as_percent(each.first),
            as_percent(each.second),
            f"{round(100 * difference, 2) + 0.0:+.2f} ± {100 * error:.2f}",
        ]
        table.add_row(
            escape(each.detector),
            *cells,
            f"{p_value:.2g}",
            each.comparison.verdict().replace("undecided", "not told apart"),
        )
    Console().print(table)
