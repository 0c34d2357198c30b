"""The fused kernel against its torch twin, on every thread arrangement, and the roads that must not enter it."""

import gc
import multiprocessing
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fdbd import kernels
from fdbd.kernels import dispatch, team, twin

kernels.warm_up(torch.float32)
kernels.warm_up(torch.float64)

DTYPES = [torch.float32, torch.float64]


def problem(rows, width, classes, dtype=torch.float32, seed=0):
    """Features, logits and a folded head of unit scale."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    folded = (random(classes, width), random(classes), random(width), torch.tensor(1e-6, dtype=dtype))
    return random(rows, width), random(rows, classes), folded


@pytest.fixture
def threads():
    """Sets the number of torch's threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 70),
    classes=st.sampled_from([2, 3, 10, 63, 64, 65, 127, 128, 129, 300]),
    dtype=st.sampled_from(DTYPES),
    divide=st.booleans(),
    given_classes=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_the_kernel_agrees_with_its_twin(rows, width, classes, dtype, divide, given_classes, seed):
    features, logits, folded = problem(rows, width, classes, dtype, seed)
    predicted = logits.argmax(dim=1)
    how = {"predicted": predicted} if given_classes else {"logits": logits}
    scores, clean = kernels.folded_score(features, *folded, divide, **how)
    expected = twin.folded_score(features, predicted, *folded, divide)
    # 1e-6 relative to the terms that are summed: their sum may be arbitrarily close to 0.
    normals, offsets, center, _ = folded
    deviation = features - center
    size = (normals[predicted] * deviation).abs().sum(dim=1) + offsets[predicted].abs()
    if divide:
        size = size / deviation.norm(dim=1).clamp_min(1e-6)
    assert clean
    assert scores.dtype == dtype
    assert scores.shape == (rows,)
    assert ((scores - expected).abs() <= (1e-6 if dtype == torch.float32 else 1e-14) * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [2, 64, 65, 128, 129, 1000])
def test_the_argmax_is_torchs_whatever_the_ties_and_signs(classes, dtype):
    width = 3
    g = torch.Generator().manual_seed(classes)
    # Few distinct values: maxima repeat within and across pieces, among them both zeros and negative rows.
    logits = torch.randint(-3, 2, (400, classes), generator=g).to(dtype)
    logits[::2] -= 2
    logits[1::4][torch.rand(100, classes, generator=g) < 0.5] *= 0.0  # −0 and +0 as maxima
    logits[0], logits[1, :], logits[1, -1] = -0.0, -0.0, 0.0
    logits[2] = torch.finfo(dtype).min
    logits[3] = -torch.arange(classes).to(dtype)
    logits[4] = torch.arange(classes).to(dtype)
    features = torch.zeros(400, width, dtype=dtype)
    offsets = torch.arange(classes).to(dtype)
    scores, _ = kernels.folded_score(
        features, torch.zeros(classes, width, dtype=dtype), offsets, features[0], features[0, 0], False, logits=logits
    )
    assert torch.equal(scores.long(), logits.argmax(dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("classes", [2, 64, 300])
def test_one_bad_logit_or_feature_anywhere_makes_its_row_nan_and_no_other(classes, bad, dtype):
    features, logits, folded = problem(20, 37, classes, dtype)
    logits[3, 0] = logits[7, classes // 2] = logits[11, classes - 1] = bad
    features[5, 0] = features[13, 36] = bad
    scores, clean = kernels.folded_score(features, *folded, True, logits=logits)
    assert not clean
    assert scores.isnan().nonzero()[:, 0].tolist() == [3, 5, 7, 11, 13]


@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 1e16), (torch.float64, 1e150)])
def test_a_row_whose_norm_overflows_is_nan(dtype, huge):
    features, logits, folded = problem(3, 8, 4, dtype)
    features[1, 2] = huge
    scores, clean = kernels.folded_score(features, *folded, True, logits=logits)
    assert scores.isnan().tolist() == [False, True, False]
    assert not clean


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
@pytest.mark.parametrize("rows", [3, 50_000])
def test_a_class_that_the_head_does_not_have_is_an_error(bad, rows):
    features, _, folded = problem(rows, 8, 4)
    predicted = torch.zeros(rows, dtype=torch.int64)
    predicted[rows // 2] = bad
    with pytest.raises(IndexError, match=r"outside 0…3"):
        kernels.folded_score(features, *folded, True, predicted=predicted)


def test_shapes_that_do_not_fit_are_refused_before_memory_is_touched():
    features, logits, folded = problem(5, 8, 4)
    with pytest.raises(ValueError, match=r"features have shape \(5, 7\), expected \(N, 8\)"):
        kernels.folded_score(features[:, :7], *folded, True, logits=logits)
    with pytest.raises(ValueError, match=r"logits of shape \(5, 4\), got \(4, 4\)"):
        kernels.folded_score(features, *folded, True, logits=logits[:4])
    with pytest.raises(ValueError, match=r"predicted classes of shape \(5,\), got \(4,\)"):
        kernels.folded_score(features, *folded, True, predicted=torch.zeros(4))
    normals, offsets, center, floor = folded
    with pytest.raises(ValueError, match="offsets, center and floor"):
        kernels.folded_score(features, normals, offsets[:3], center, floor, True, logits=logits)


def test_strided_transposed_and_small_integer_inputs_score_like_their_copies():
    features, logits, folded = problem(30, 16, 5)
    expected, _ = kernels.folded_score(features, *folded, True, logits=logits)
    strided = torch.zeros(60, 32)
    strided[::2, ::2] = features
    scores, _ = kernels.folded_score(strided[::2, ::2], *folded, True, logits=logits.T.contiguous().T)
    assert torch.equal(scores, expected)
    predicted = logits.argmax(dim=1).to(torch.uint8)
    assert torch.equal(kernels.folded_score(features, *folded, True, predicted=predicted)[0], expected)


# Threads


def large(dtype=torch.float32):
    return problem(6000, 96, 40, dtype, seed=5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_digit_depends_on_the_number_of_threads(threads, dtype):
    features, logits, folded = large(dtype)
    results = []
    for count in (1, 2, 3):
        threads(count)
        scores, _ = kernels.folded_score(features, *folded, True, logits=logits)
        results.append((scores, kernels.column_sums(features)))
    for scores, sums in results[1:]:
        assert torch.equal(scores, results[0][0])
        assert torch.equal(sums, results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_that_no_cache_holds_is_scored_alike_and_each_row_by_itself(dtype):
    features, logits, folded = problem(23, 64, 70_000, dtype)
    logits[5, 7] = np.nan
    together, clean = kernels.folded_score(features, *folded, True, logits=logits)
    assert not clean
    expected = twin.folded_score(features, logits.nan_to_num().argmax(dim=1), *folded, True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    assert together.isnan().nonzero().tolist() == [[5]]
    torch.testing.assert_close(together[6:], expected[6:], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(together[:5], expected[:5], rtol=tolerance, atol=tolerance)
    alone = [kernels.folded_score(features[i : i + 1], *folded, True, logits=logits[i : i + 1])[0] for i in range(23)]
    torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=0, equal_nan=True)


def test_as_many_threads_as_torch_has_work_on_large_inputs_and_one_on_small(threads, monkeypatch):
    asked = []

    def parallel(_function, block, count, _flags):
        asked.append(count)
        dispatch._compiled[torch.float32][0].run(block)

    monkeypatch.setattr(team, "openmp", lambda: parallel)
    features, logits, folded = large()
    for count in (3, 2, 1):
        threads(count)
        kernels.folded_score(features, *folded, True, logits=logits)
        kernels.folded_score(features[:5], *folded, True, logits=logits[:5])
    assert asked == [3, 2]


def test_plain_threads_do_the_same_where_torch_has_no_openmp(threads, monkeypatch):
    features, logits, folded = large()
    expected, _ = kernels.folded_score(features, *folded, True, logits=logits)
    sums = kernels.column_sums(features)
    monkeypatch.setattr(team, "openmp", lambda: None)
    threads(3)
    for _ in range(20):
        assert torch.equal(kernels.folded_score(features, *folded, True, logits=logits)[0], expected)
        assert torch.equal(kernels.column_sums(features), sums)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch's OpenMP has this entry point on Linux")
def test_torchs_own_openmp_library_is_found_on_linux():
    assert team.openmp() is not None


@pytest.mark.parametrize("openmp", [True, False], ids=["torch's team", "plain threads"])
def test_eight_python_threads_at_once_get_what_one_gets(openmp, monkeypatch):
    if not openmp:
        monkeypatch.setattr(team, "openmp", lambda: None)
    problems = [problem(2000 + 100 * i, 80, 30, seed=i) for i in range(8)]

    def work(index):
        features, logits, folded = problems[index]
        return kernels.folded_score(features, *folded, True, logits=logits)[0], kernels.column_sums(features)

    expected = [work(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for index, (scores, sums) in zip(list(range(8)) * 10, pool.map(work, list(range(8)) * 10)):
            assert torch.equal(scores, expected[index][0])
            assert torch.equal(sums, expected[index][1])


def _score_in_child(sender, features, logits, folded):
    scores, _ = kernels.folded_score(features, *folded, True, logits=logits)
    sender.send((scores.tolist(), kernels.column_sums(features).tolist()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_scores_after_its_parent_did():
    features, logits, folded = large()
    expected, _ = kernels.folded_score(features, *folded, True, logits=logits)  # the parent's team now exists
    sums = kernels.column_sums(features)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = multiprocessing.get_context("fork").Process(
            target=_score_in_child, args=(sender, features, logits, folded)
        )
        child.start()
    answered = receiver.poll(60)
    if not answered:
        child.kill()
    child.join()
    assert answered, "the child hangs"
    scores, child_sums = receiver.recv()
    assert scores == expected.tolist()
    assert child_sums == sums.tolist()


# Roads that lead to the twin


def reaches_kernel(monkeypatch, run):
    """Whether `run` enters the kernel."""
    entered = []
    share = team.share
    monkeypatch.setattr(team, "share", lambda *arguments: (entered.append(1), share(*arguments)))
    run()
    return bool(entered)


def test_plain_cpu_tensors_reach_the_kernel(monkeypatch):
    features, logits, folded = problem(5, 8, 4)
    assert reaches_kernel(monkeypatch, lambda: kernels.folded_score(features, *folded, True, logits=logits))
    assert reaches_kernel(
        monkeypatch, lambda: kernels.folded_score(torch.nn.Parameter(features, False), *folded, True, logits=logits)
    )


def test_tensors_that_record_gradients_do_not(monkeypatch):
    features, logits, folded = problem(5, 8, 4)
    features.requires_grad_()
    assert not reaches_kernel(monkeypatch, lambda: kernels.folded_score(features, *folded, True, logits=logits))
    with torch.no_grad():
        assert reaches_kernel(monkeypatch, lambda: kernels.folded_score(features, *folded, True, logits=logits))
    with torch.inference_mode():
        assert reaches_kernel(monkeypatch, lambda: kernels.folded_score(features, *folded, True, logits=logits))


def test_a_kernel_that_was_never_warmed_up_is_not_compiled_in_a_call(monkeypatch):
    monkeypatch.setattr(dispatch, "_compiled", {})
    features, logits, folded = problem(5, 8, 4)
    assert not reaches_kernel(monkeypatch, lambda: kernels.folded_score(features, *folded, True, logits=logits))


def test_half_precision_meta_and_subclass_tensors_do_not():
    features, logits, _ = problem(5, 8, 4)
    assert not dispatch.fits_kernel(features.half())
    assert not dispatch.fits_kernel(features.to("meta"))
    assert not dispatch.fits_kernel(features, logits.double())

    class Special(torch.Tensor):
        pass

    assert not dispatch.fits_kernel(features.as_subclass(Special))


def test_negated_views_are_scored_by_their_value():
    imaginary = (
        torch.complex(torch.zeros(4, 8), torch.randn(4, 8)).conj().imag
    )  # a lazy −: the memory holds the opposite
    assert imaginary.is_neg()
    _, logits, folded = problem(4, 8, 3)
    scores, _ = kernels.folded_score(imaginary, *folded, True, logits=logits)
    expected, _ = kernels.folded_score(imaginary.resolve_neg().clone(), *folded, True, logits=logits)
    assert torch.allclose(scores, expected)


@pytest.mark.filterwarnings("ignore")
def test_recorded_graphs_hold_the_computation_and_not_its_result():
    features, logits, folded = problem(5, 8, 4)
    others, other_logits, _ = problem(5, 8, 4, seed=1)
    expected, _ = kernels.folded_score(others, *folded, True, logits=other_logits)

    def score(z, outputs):
        return kernels.folded_score(z, *folded, True, logits=outputs)[0]

    for record in (
        lambda: torch.jit.trace(score, (features, logits)),
        lambda: make_fx(score)(features, logits),
        lambda: torch.compile(score, fullgraph=True, backend="eager"),
    ):
        torch.testing.assert_close(record()(others, other_logits), expected)
    torch.testing.assert_close(torch.func.vmap(lambda z, y: score(z[None], y[None])[0])(others, other_logits), expected)


def test_forward_mode_derivatives_agree_with_finite_differences():
    features, logits, folded = problem(5, 8, 4, torch.float64)
    direction = torch.randn_like(features)

    def score(z):
        return kernels.folded_score(z, *folded, True, logits=logits)[0]

    gc.disable()  # torch parses its own source, and CPython 3.11 fails where a collection interrupts (gh-106905)
    try:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(features, direction)
            tangent = torch.autograd.forward_ad.unpack_dual(score(dual)).tangent
    finally:
        gc.enable()
    numeric = (score(features + 1e-6 * direction) - score(features - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close(tangent, numeric, rtol=1e-6, atol=1e-8)


def test_the_default_device_of_the_program_does_not_matter():
    features, logits, folded = problem(5, 8, 4)
    expected = kernels.folded_score(features, *folded, True, logits=logits)[0], kernels.column_sums(features)
    with torch.device("meta"):
        assert torch.equal(kernels.folded_score(features, *folded, True, logits=logits)[0], expected[0])
        assert torch.equal(kernels.column_sums(features), expected[1])


# Sums over rows


@given(
    rows=st.integers(0, 700), width=st.integers(0, 40), dtype=st.sampled_from([*DTYPES, torch.float16, torch.bfloat16])
)
@settings(max_examples=60, deadline=None)
def test_column_sums_are_those_of_float64(rows, width, dtype):
    features = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
    expected = np.array([sum(float(value) for value in column) for column in features.double().numpy().T])
    np.testing.assert_allclose(kernels.column_sums(features).numpy(), expected, rtol=1e-12, atol=1e-12)


def test_column_sums_of_a_large_strided_matrix_are_those_of_float64():
    features = torch.randn(3000, 200, generator=torch.Generator().manual_seed(0))[:, ::2]
    torch.testing.assert_close(kernels.column_sums(features), features.double().sum(dim=0), rtol=0, atol=1e-10)


# Compilation


def test_a_folder_that_cannot_be_written_means_no_cache_and_no_error():
    from fdbd.kernels import fused

    def decorator(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: SimpleNamespace(function=function, options=options)

    assert fused.compiled(decorator, print).function is print


@pytest.mark.slow
def test_machine_code_is_kept_on_disk_for_the_next_process(tmp_path):
    code = """
import torch
from fdbd import kernels, linalg
from fdbd.kernels import dispatch
kernels.warm_up()
linalg.warm_up_search(torch.float32)
from fdbd.kernels import selection
kept = [kernel.code.cache_hits for kernel in dispatch._compiled[torch.float32]]
kept += [sum(function.stats.cache_hits.values()) for function in (selection._add, selection._finish)]
print(min(kept), max(kept))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    hits = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [text.split() for text in hits] == [["0", "0"], ["1", "1"]]
