"""Find documents on topics that the classifier was not trained on, with TF-IDF, logistic regression
and fDBD.

The texts ship with scipy (a dependency of scikit-learn): the documentation of its functions, one
topic per submodule. Four topics are known, three are not. Run ``python examples/text_topics.py``;
it takes about ten seconds.
"""

from __future__ import annotations

import importlib
import inspect

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

import fdbd
from fdbd.integrations.sklearn import OODDetector

KNOWN = ("stats", "signal", "linalg", "optimize")
UNSEEN = ("ndimage", "interpolate", "spatial")


def documents(topic: str) -> list[str]:
    """The documentation of every public function and class of a scipy submodule."""
    module = importlib.import_module(f"scipy.{topic}")
    found = {inspect.getdoc(getattr(module, name)) or "" for name in module.__all__}
    return sorted(text for text in found if len(text) > 200)


def main() -> dict[str, float]:
    texts: list[str] = []
    topics: list[str] = []
    for topic in KNOWN:
        found = documents(topic)
        texts += found
        topics += [topic] * len(found)
    unseen: list[str] = []
    for topic in UNSEEN:
        unseen += documents(topic)
    train, test, train_topics, test_topics = train_test_split(
        texts, topics, stratify=topics, random_state=0
    )

    classifier = make_pipeline(
        TfidfVectorizer(sublinear_tf=True, min_df=2), LogisticRegression(C=10, max_iter=1000)
    )
    model = OODDetector(classifier, detector="fdbd", tpr=0.9).fit(train, train_topics)

    result = {
        "accuracy": float((model.predict_class(test) == test_topics).mean()),
        "accepted_known": float((model.predict(test) == 1).mean()),
        "accepted_unseen": float((model.predict(unseen) == 1).mean()),
        "auroc": fdbd.metrics.auroc(model.score_samples(test), model.score_samples(unseen)),
    }
    print(
        f"trained on {len(train)} documents on {', '.join(KNOWN)}; tested on {len(test)} more and"
        f" {len(unseen)} others"
    )
    print(f"topic accuracy on known topics    {result['accuracy']:.3f}")
    print(f"accepted, known topics            {result['accepted_known']:.3f}   (asked for 0.9)")
    print(f"accepted, unseen topics           {result['accepted_unseen']:.3f}")
    print(f"AUROC                             {result['auroc']:.3f}")
    print("\nthe unseen documents it is most sure to reject:")
    scores = model.decision_function(unseen)
    for index in scores.argsort()[:5]:
        print(f"  {scores[index]:+.3f}  {unseen[index].splitlines()[0][:90]}")
    return result


if __name__ == "__main__":
    main()
