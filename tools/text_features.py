"""Features of text for `fdbd bench`: ``python tools/text_features.py clinc150|newsgroups20
FOLDER``.

MiniLM sentence embeddings of a public dataset (its file lies below FDBD_DATA), a logistic head
fitted on the training texts, and the sets that are out of distribution, written as `fdbd bench
--share` writes them; then ``fdbd bench FOLDER``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression

from fdbd.bench.runner import Benchmark
from fdbd.bench.sharing import share
from fdbd.core.batch import Head
from fdbd.data.features import FeatureSet
from fdbd.data.text import Texts, TextSets, load_clinc150, load_newsgroups20, with_ood
from fdbd.networks.sentences import PACKAGE, VERSION, SentenceEncoder

TITLES = {
    "clinc150": "MiniLM sentence embeddings on CLINC150's 150 intents",
    "newsgroups20": "MiniLM sentence embeddings on 16 newsgroups",
}
# Inverse strength of the head's L2 penalty. Embeddings have unit length, so that weights must be
# large; chosen for the accuracy on the training texts' own cross-validation, not on OOD data.
C = {"clinc150": 100.0, "newsgroups20": 10.0}
MAX_TOKENS = {"clinc150": 64, "newsgroups20": 128}


def load_sets(name: str) -> TextSets:
    """The dataset, with texts of the other one as a second, far set out of distribution."""
    if name == "clinc150":
        posts = load_newsgroups20().test
        return with_ood(load_clinc150(), "newsgroups20", posts)
    return with_ood(load_newsgroups20(), "clinc150", load_clinc150().test)


def make(name: str, folder: Path) -> None:
    """Embed, fit the head, write the folder."""
    sets = load_sets(name)
    encoder = SentenceEncoder(max_tokens=MAX_TOKENS[name])

    def embed(title: str, texts: Texts) -> FeatureSet:
        print(f"{title}: {len(texts):,} texts", file=sys.stderr)
        features = torch.from_numpy(encoder(texts.texts))
        labels = None if texts.labels is None else torch.from_numpy(texts.labels)
        return FeatureSet(title, features, labels, None, samples=f"{title} {sets.file}")

    train = embed(f"{sets.name} (train)", sets.train)
    test = embed(sets.name, sets.test)
    ood = [embed(title, texts) for title, texts in sets.ood.items()]
    classifier = LogisticRegression(C=C[name], max_iter=2000)
    classifier.fit(train.features.numpy(), sets.train.labels)
    accuracy = classifier.score(test.features.numpy(), sets.test.labels)
    print(f"accuracy on {len(test):,} test texts: {accuracy:.2%}")
    near = next(iter(sets.ood))
    benchmark = Benchmark(
        Head(
            torch.from_numpy(classifier.coef_).float(),
            torch.from_numpy(classifier.intercept_).float(),
        ),
        train,
        test,
        ood,
        groups={"near": [near], "far": [title for title in sets.ood if title != near]},
        title=TITLES[name],
        class_names=sets.train.classes,
        notes=[
            (
                f"Features: all-MiniLM-L6-v2 in int8 (npm {PACKAGE} {VERSION}), mean of the tokens,"
                f" unit length, at most {MAX_TOKENS[name]} tokens."
            ),
            f"Head: multinomial logistic regression, C = {C[name]:g}.",
            f"Texts: {sets.file}.",
        ],
    )
    share(benchmark, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", choices=sorted(TITLES))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    make(given.dataset, given.folder)
