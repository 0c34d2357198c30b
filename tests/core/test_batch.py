"""What a Batch can do with all of its parts at once."""

import numpy as np
import torch

from fdbd import Batch

FEATURES = torch.arange(12.0).reshape(4, 3)
WHOLE = Batch(
    FEATURES,
    FEATURES[:, :2],
    torch.arange(4),
    {"a": FEATURES[:, :1]},
    torch.stack([FEATURES, -FEATURES]),
)


def test_rows_are_taken_from_every_part() -> None:
    for which in (torch.tensor([3, 1]), slice(1, 4, 2), torch.tensor([False, True, False, True])):
        taken = WHOLE.rows(which)
        assert torch.equal(taken.features, FEATURES[which])
        assert torch.equal(taken.logits, FEATURES[which][:, :2])
        assert torch.equal(taken.labels, torch.arange(4)[which])
        assert torch.equal(taken.layers["a"], FEATURES[which][:, :1])
        assert torch.equal(taken.views[1], -FEATURES[which])


def test_a_cast_leaves_labels_as_they_are() -> None:
    cast = WHOLE.to(dtype=torch.float64)
    assert {part.dtype for part in (cast.features, cast.logits, cast.views, cast.layers["a"])} == {
        torch.float64
    }
    assert cast.labels.dtype == torch.int64


def test_arrays_become_tensors_and_missing_parts_stay_missing() -> None:
    moved = Batch(np.ones((2, 3), np.float32), labels=np.array([0, 1])).to("cpu")
    assert isinstance(moved.features, torch.Tensor)
    assert moved.labels.tolist() == [0, 1]
    assert moved.logits is None
    assert moved.layers is None
    assert moved.views is None


def test_a_detached_batch_has_no_gradient() -> None:
    batch = Batch(
        FEATURES.clone().requires_grad_(), views=FEATURES[None].clone().requires_grad_()
    ).detach()
    assert not batch.features.requires_grad
    assert not batch.views.requires_grad
