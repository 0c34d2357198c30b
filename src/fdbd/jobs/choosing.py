"""`fdbd.choose` on files: training images or features, held-out ones, and OOD sets if there are
any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fdbd.core.batch import Head
from fdbd.data.images import Images
from fdbd.data.inputs import Rows, open_rows
from fdbd.decision.advice import Advice, choose
from fdbd.decision.choice import Auto
from fdbd.jobs.fitting import Loader, preparation_for
from fdbd.jobs.scoring import Engine
from fdbd.networks.by_name import NamedModel

HELD_OUT = 0.2
"""Share of the training data that is held out if no other data are given."""
SAME_DATA = (
    "held-out samples are a part of DATA: if the network was trained on DATA, its features of them "
    "are too good, and detectors are weighed less well; give --held-out DATA that it never saw"
)


def choose_files(
    source: NamedModel | Head,
    data: str,
    held_out: str | None = None,
    ood: Sequence[str] = (),
    auto: Auto | None = None,
    engine: Engine = Engine(),  # noqa: B008 - it never changes
    *,
    head: str | None = None,
    split: str = "train",
) -> Advice:
    """Compare detectors on files.

    Args:
        source: a model, for images or for features of it; or a head alone, for features.
        data: images or features to fit on, as in `open_rows`.
        held_out: other data of the same kind, which the network never saw; of a dataset by name,
            the test part. None: a random part of `data`, with a caution.
        ood: images or features that are out-of-distribution, if there are any.
        auto: options of the choice.
        engine: where the network runs: in this process alone.
        head: name of the model's last linear layer, if it is not found.
        split: which part of a dataset by name the fit takes.
    """
    if isinstance(source, NamedModel) and source.tokenizer is not None:
        raise ValueError(
            "the model takes texts, and files of images or features are compared here: for texts "
            "call fdbd.choose in Python, with auto=fdbd.Auto(kinds=fdbd.data.token_kinds)"
        )
    if engine.name != "local":
        raise ValueError("detectors are chosen in one process: leave --engine out")
    rows = open_rows(data, split)
    preparation = preparation_for(source, rows, data)
    model = source if isinstance(source, Head) else source.model
    linear = _head_of(source, head)

    def loader(rows: Rows) -> Loader:
        return Loader(rows, linear, preparation, engine)

    training = loader(rows)
    cautions: tuple[str, ...] = ()
    if held_out is None:
        fresh = loader(rows)
        is_held = np.random.default_rng(0).permutation(len(rows)) < round(HELD_OUT * len(rows))
        training.choose(~is_held)
        fresh.choose(is_held)
        cautions = (SAME_DATA,)
    else:
        fresh = loader(open_rows(held_out, "test"))
    outside = {}
    for name in ood:
        opened = open_rows(name, "test")
        title = opened.name if isinstance(opened, Images) else name
        outside[title] = loader(opened)
    advice = choose(
        model,
        training,
        fresh,
        ood=outside or None,
        auto=auto,
        head=head,
        progress=engine.progress,
    )
    errors = [*training.errors, *fresh.errors]
    if errors:
        cautions += (f"{len(errors)} rows were left out, the first: {errors[0]}",)
    return replace(advice, cautions=cautions)


def _head_of(source: NamedModel | Head, head: str | None) -> Head:
    from fdbd.networks.classifier import Classifier

    if isinstance(source, Head):
        return source
    return Classifier(source.model, head).head
