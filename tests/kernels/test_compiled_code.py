"""What torch.compile makes of the plain definition of fDBD's score."""

import re

import pytest
import torch

import fdbd


@pytest.mark.slow
def test_the_score_is_one_fused_kernel() -> None:
    utils = pytest.importorskip("torch._inductor.utils")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(64, 512, generator=generator)
    head = fdbd.Head(torch.randn(10, 512, generator=generator))
    detector = fdbd.FDBD().fit(fdbd.Batch(features), head)

    def score(features: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return detector.score(fdbd.Batch(features, logits))

    compiled = torch.compile(score, fullgraph=True)
    scores, sources = utils.run_and_get_code(compiled, features, head(features))
    kernels = re.findall(r"^\w+ = async_compile\.\w+", "\n".join(sources), flags=re.MULTILINE)
    assert len(kernels) == 1, kernels
    torch.testing.assert_close(scores, detector.score(fdbd.Batch(features)), rtol=1e-4, atol=1e-5)
