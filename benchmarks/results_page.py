"""Measures the sections of docs/results.md: the output of `fdbd bench` for the package's features
and for each config.

    FDBD_DATA=FOLDER python benchmarks/results_page.py [NAME …]

With names (cifar10-ce, cifar10-resnet20, …) only their sections are measured again; the others stay
as they are.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

from fdbd.bench import Config, Results, benchmark_of, load_bundle
from fdbd.bench.config import detectors_from
from fdbd.bench.sharing import load_shared
from fdbd.networks import list_zoo
from fdbd.util.files import write_text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import text_features  # noqa: E402

PAGE = ROOT / "docs" / "results.md"
TEXT = ("text-clinc150", "text-newsgroups20")


def section(name: str) -> str:
    """One benchmark as Markdown, measured now."""
    if name in list_zoo():
        command = f"fdbd bench --model {name}"
        benchmark = load_bundle(name)
        detectors = None
    elif name in TEXT:
        dataset = name.removeprefix("text-")
        command = (
            f"FDBD_DATA=FOLDER python tools/text_features.py {dataset} features\n"
            "    fdbd bench features"
        )
        with tempfile.TemporaryDirectory() as folder:
            text_features.make(dataset, Path(folder))
            benchmark = load_shared(Path(folder))
        detectors = None
    else:
        command = f"FDBD_DATA=FOLDER fdbd bench configs/{name}.toml"
        config = Config.from_file(ROOT / "configs" / f"{name}.toml")
        benchmark = benchmark_of(config)
        detectors = None if config.detectors is None else detectors_from(config.detectors)
    started = time.perf_counter()
    results = benchmark.run(detectors, latency=False)
    return as_markdown(name, command, results, time.perf_counter() - started)


def as_markdown(name: str, command: str, results: Results, seconds: float) -> str:
    """A heading, the command, the table, and how long it took."""
    # Names of files, without the folders of one machine.
    text = re.sub(r"(?<![\w.:/])/(?:[\w.-]+/)+", "", results.to_markdown())
    title, _, table = text.partition("\n")
    took = f"{len(results.finished)} detectors in {seconds:.0f} s on cached features."
    return f"<!-- {name} -->\n## {title.strip('*')}\n\n    {command}\n{table}\n{took}\n"


def main() -> None:
    configs = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))
    names = [*list_zoo(), *configs, *TEXT]
    wanted = sys.argv[1:] or names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        sys.exit(f"no section {', '.join(unknown)}; there are {', '.join(names)}")
    # Each is written as soon as it is measured.
    for name in wanted:
        measured = section(name)
        introduction, *parts = PAGE.read_text(encoding="utf-8").split("<!-- ")
        sections = {part.partition(" -->")[0]: f"<!-- {part}".rstrip() for part in parts}
        sections[name] = measured.rstrip()
        found = [sections[each] for each in names if each in sections]
        write_text(PAGE, "\n\n".join([introduction.rstrip(), *found]) + "\n")
        print(measured, flush=True)


if __name__ == "__main__":
    main()
