"""fdbd compare: two results of fdbd bench side by side."""

from __future__ import annotations

from pathlib import Path

from fdbd.commands.options import JSON, answer, arg, print_table


def compare(
    first: Path = arg(..., "A results.json of fdbd bench."),
    second: Path = arg(..., "Another."),
    as_json: bool = JSON,
) -> None:
    """Compare two results: AUROC of each detector in both, over the OOD sets that both have, and whether they differ.

    Where both files hold the scores of the same samples, the test is paired: two models on the same images, or two
    versions of one. Elsewhere the results count as independent, which tells less apart.

    Example: `fdbd compare before/results.json after/results.json`
    """
    from fdbd.bench import Results
    from fdbd.metrics import as_percent
    from fdbd.results.table import compare_results

    sets, found = compare_results(Results.from_json(first), Results.from_json(second))
    if as_json:
        lines = [
            {"detector": each.detector, "first": each.first.to_dict(), "second": each.second.to_dict()}
            | {**each.comparison._asdict(), "paired": each.paired, "verdict": each.comparison.verdict()}
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
        rows.append([each.detector, as_percent(each.first), as_percent(each.second), points, f"{p_value:.2g}", verdict])
    print_table(
        ["detector", "first", "second", "difference", "p", "second is"],
        rows,
        right=["first", "second", "difference", "p"],
        caption=f"Mean AUROC in percent over {', '.join(sets)}; difference of the second from the first ± its "
        f"standard error; verdict at the 5 % level, {how.get(paired, f'{paired} of {len(found)} paired')}.",
    )
