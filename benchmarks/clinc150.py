"""CLINC150 end to end: ``python benchmarks/clinc150.py``.

MiniLM sentence vectors, a logistic head on the 15,000 training queries, guards calibrated at
α = 0.05 on the 3,000 queries of the validation part, false alarms on 4,500 test queries, and the
share of 1,000 out-of-scope queries that is found. Then the same without a head: the vectors of the
intents' names are the classes. CLINC150's file lies below FDBD_DATA. ``--vectors FILE`` keeps the
vectors for the next run, ``--write FILE`` writes the part that is in the package.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fdbd
from fdbd.data.text import CLINC150, CLINC150_VECTORS, find_text_file, load_clinc150
from fdbd.jobs.sentences import fit_head
from fdbd.metrics import auroc
from fdbd.networks.sentence_model import MINILM, sentence_transformer

ALPHA = 0.05
DETECTORS = ("fdbd", "energy", "maxlogit", "nci", "msp", "vim", "mds", "knn")
PER_CLASS = {"train": 20, "fresh": 10, "test": 10}
"""Queries of each intent that are in the package."""


def embed_all() -> dict[str, Tensor]:
    """Unit vectors and labels of all parts."""
    sets = load_clinc150()
    encoder = sentence_transformer(MINILM)
    content = json.loads(find_text_file(*CLINC150).read_bytes())
    classes = sets.train.classes
    names = [name.replace("_", " ") for name in classes]
    found = {"names": encoder.embed(names)}
    for part, key in {"train": "train", "fresh": "val", "test": "test", "oos": "oos_test"}.items():
        rows = content[key]
        print(f"{part}: {len(rows):,} queries", file=sys.stderr)
        found[part] = encoder.embed([text for text, _ in rows])
        if part != "oos":
            labels = [classes.index(intent) for _, intent in rows]
            found[f"{part}_labels"] = torch.tensor(labels)
    return found


def measure(vectors: dict[str, Tensor]) -> None:
    """Print what guards with a fitted head and zero-shot guards do."""
    train = fdbd.Batch(vectors["train"], labels=vectors["train_labels"])
    head = fit_head(train.features, vectors["train_labels"])
    accuracy = (head(vectors["test"]).argmax(dim=1) == vectors["test_labels"]).double().mean()
    print(f"logistic head: accuracy {accuracy:.2%} on {len(vectors['test']):,} queries")
    print(f"{'':24}false alarms   out of scope, found   AUROC   (α = {ALPHA})")
    for name in DETECTORS:
        report(name, fdbd.Guard(head, name).fit([train], progress=False), vectors)
    prompts = fdbd.Head.cosine(vectors["names"], scale=100)
    accuracy = (prompts(vectors["test"]).argmax(dim=1) == vectors["test_labels"]).double().mean()
    print(f"names of the intents as classes: accuracy {accuracy:.2%}")
    report("mcm", fdbd.Guard.zero_shot(None, vectors["names"]), vectors)
    for name in ("maxlogit", "fdbd"):
        report(name, fdbd.Guard(prompts, name).fit([train], progress=False), vectors)


def report(name: str, guard: fdbd.Guard, vectors: dict[str, Tensor]) -> None:
    """One line of the table."""
    guard.calibrate([fdbd.Batch(vectors["fresh"])], alpha=ALPHA, progress=False)
    known = guard.decide(fdbd.Batch(vectors["test"]))
    unknown = guard.decide(fdbd.Batch(vectors["oos"]))
    alarms = known.is_ood.double().mean()
    found = unknown.is_ood.double().mean()
    separation = auroc(known.scores, unknown.scores)
    print(f"{name:24}{alarms:12.2%}   {found:19.2%}   {separation:.4f}")


def write_part(vectors: dict[str, Tensor], path: Path) -> None:
    """Some vectors of each intent, and all that are out of scope, in 8 bits."""
    kept: dict[str, Tensor] = {}
    for part in ("train", "fresh", "test", "oos", "names"):
        rows = torch.arange(len(vectors[part]))
        if part in PER_CLASS:
            labels = vectors[f"{part}_labels"]
            rows = torch.cat(
                [
                    torch.nonzero(labels == intent)[: PER_CLASS[part], 0]
                    for intent in range(len(vectors["names"]))
                ]
            )
            kept[f"{part}_labels"] = labels[rows].to(torch.uint8)
        chosen = vectors[part][rows]
        scales = chosen.abs().amax(dim=1, keepdim=True) / 127
        kept[part] = (chosen / scales).round().to(torch.int8)
    about = {"classes": json.dumps(load_clinc150().train.classes)}
    save_file(kept, path, metadata=about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=Path, help="a .safetensors file that keeps the vectors")
    parser.add_argument("--write", type=Path, help=f"such as {CLINC150_VECTORS}")
    given = parser.parse_args()
    if given.vectors is not None and given.vectors.is_file():
        vectors = load_file(given.vectors)
    else:
        vectors = embed_all()
        if given.vectors is not None:
            save_file(vectors, given.vectors)
    measure(vectors)
    if given.write is not None:
        write_part(vectors, given.write)


if __name__ == "__main__":
    main()
