"""The distance to the k-th nearest training feature."""

from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fdbd.core.linear_algebra import SMALLEST_NORM, largest_products, unit
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    expect,
    one_of,
)
from fdbd.fitting.statistics import Bank
from fdbd.util.torch_compat import tracing

Index = Literal["exact", "flat", "ivf", "hnsw"]


class Banked(Detector):
    """A detector that keeps training samples in a bank (…, M, P): an `alpha` share of all, and `k`
    at least."""

    bank: Annotated[Tensor, "M P"]

    def __init__(self, k: int, alpha: float) -> None:
        super().__init__()
        self.k = at_least_one("k", k, "a number of neighbours, at least 1")
        expected = "the fraction of training samples to keep, above 0 and at most 1"
        self.alpha = float(expect("alpha", alpha, 0 < alpha <= 1, expected))

    def keep(self, bank: Tensor) -> None:
        """Keep a bank that nobody else holds, without a copy."""
        self._set_buffer("bank", bank)
        self._require_enough()

    def _check_buffers(self) -> None:
        super()._check_buffers()
        self._require_enough()

    def _require_enough(self) -> None:
        count = self.bank.shape[-2]
        if count < self.k:
            raise ValueError(
                f"k is {self.k}, but only {count} training samples were kept (alpha={self.alpha}): "
                "lower k, raise alpha or give more data"
            )


class KNN(Banked):
    """Distance of the normalised feature to its k-th nearest neighbour among the training features
    (Sun et al., 2022).

        score(z) = −‖ẑ − ẑ_(k)‖,   ẑ = z/‖z‖

    Exact by default: one matrix product with the bank and a selection, O(MP) per sample for M
    samples kept. The bank takes 4MP bytes; a training feature of zero has no direction and is left
    out of it. KNN+ is the same on contrastive features. Settings of the paper: k = 50 for CIFAR-10
    (the default), 200 for CIFAR-100, and for ImageNet ``KNN(k=1000)`` or ``KNN(k=10, alpha=0.01)``.

    Args:
        k: which neighbour.
        alpha: fraction of the training samples to keep, chosen by a hash of each sample.
        index: "exact": torch's matrix product; "flat": faiss's exact search, which gives the same
            scores; "ivf" and "hnsw": faiss's approximate indices, built from the bank at the first
            score (`recall` measures what they miss), for banks of hundreds of thousands: smaller
            ones are searched as fast exactly. faiss comes with ``pip install 'fdbd[knn]'``; without
            it "flat" falls back to "exact". Gradients, other devices and float64 always use the
            exact product, and so do exported graphs, which an approximate index cannot become.

    >>> bank = torch.eye(3).repeat(2, 1)
    >>> KNN(k=2).fit(Batch(bank), Head(torch.eye(3))).score(Batch(torch.tensor([[5.0, 0.0, 0.0]])))
    tensor([-0.])
    """

    name = "knn"
    paper = Paper(
        "Out-of-Distribution Detection with Deep Nearest Neighbors", "Sun et al.", "ICML", 2022
    )
    needs = Needs(passes=1)

    def __init__(self, k: int = 50, alpha: float = 1.0, index: Index = "exact") -> None:
        super().__init__(k, alpha)
        self.index = one_of("index", index, "exact", "flat", "ivf", "hnsw")
        self._built: tuple[Tensor, Any] | None = None

    def passes(self, head: Head) -> Passes:
        self._built = None
        bank = yield Bank(self.alpha, partial(_directions, self.fit_dtype))
        self.keep(bank.samples(self.fit_dtype))

    def formula(self, batch: Batch) -> Tensor:
        rows = unit(batch.features)
        products, indices = self._search(rows)
        kth = indices.gather(1, products.argmin(dim=1, keepdim=True))[:, 0]
        # The distance itself, not √(2 − 2 cos), which loses half the digits next to a neighbour.
        distance: Tensor = torch.linalg.vector_norm(rows - self.bank[kth], dim=1)
        return -distance

    def recall(self, batch: Batch) -> float:
        """Fraction of the k exact nearest neighbours that the index finds, over the samples of a
        batch."""
        rows = unit(self._prepare(batch).features)
        _, exact = largest_products(rows, self.bank, self.k)
        _, found = self._search(rows)
        hits = 0
        for mine, true in zip(found, exact):
            hits += int(torch.isin(mine, true).sum())
        return hits / max(exact.numel(), 1)

    def _search(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products with the k nearest of the bank and their indices, (N, k) each."""
        index = self._faiss_index(rows)
        if index is None:
            return largest_products(rows, self.bank, self.k)
        found_products, found_indices = index.search(rows.detach().contiguous().numpy(), self.k)
        products = torch.from_numpy(found_products)
        indices = torch.from_numpy(found_indices)
        # An approximate index may look at fewer than k samples: those rows are searched exactly.
        short = (indices < 0).any(dim=1).nonzero()[:, 0]
        if len(short):
            products[short], indices[short] = largest_products(rows[short], self.bank, self.k)
        return products, indices

    def _faiss_index(self, rows: Tensor) -> Any:
        """The index of the bank, built at its first use; None if these rows are searched by the
        exact product."""
        if self.index == "exact" or tracing():
            return None
        if not rows.is_cpu or rows.dtype != torch.float32 or rows.requires_grad:
            return None
        if self._built is None or self._built[0] is not self.bank:
            self._built = (self.bank, build_index(self.bank, self.index, self.k))
        return self._built[1]

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles build their own index.
        return {**self.__dict__, "_built": None}


def _directions(dtype: torch.dtype, batch: Batch) -> Tensor:
    """(M, P) normalised features of the samples that have a direction."""
    rows = batch.features.to(dtype)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    has_direction = (norms[:, 0] > SMALLEST_NORM) & torch.isfinite(norms[:, 0])
    if has_direction.all():
        return rows / norms
    return rows[has_direction] / norms[has_direction]


def build_index(bank: Tensor, kind: Index, k: int) -> Any:
    """A faiss index of (M, P) rows by inner product, set for the k nearest; None for "flat" without
    faiss."""
    try:
        import faiss
    except ImportError:
        if kind == "flat":
            return None
        raise ImportError(
            f"the {kind!r} index needs faiss: pip install 'fdbd[knn]', or use index='exact'"
        ) from None
    count, width = bank.shape
    index: Any
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(width, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = max(128, 2 * k)
    elif kind == "ivf":
        # faiss wants 39 samples per cell to train on.
        cells = max(1, min(round(4 * count**0.5), count // 39))
        quantizer = faiss.IndexFlatIP(width)
        index = faiss.IndexIVFFlat(quantizer, width, cells, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = max(1, cells // 16)
        index.train(bank.numpy())
    else:
        index = faiss.IndexFlatIP(width)
    index.add(bank.numpy())
    return index
