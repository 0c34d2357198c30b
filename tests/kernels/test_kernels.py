"""The compiled kernels against their definitions in plain torch, threads, compilation, and what
bypasses them."""

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fdbd import kernels
from fdbd.kernels import dispatch, threads
from fdbd.util.torch_compat import is_plain

DTYPES = [torch.float32, torch.float64]


def problem(rows, width, classes, dtype=torch.float32, seed=0):
    """Features, logits and a folded head of unit scale."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    folded = (
        random(classes, width),
        random(classes),
        random(width),
        torch.tensor(1e-6, dtype=dtype),
    )
    return random(rows, width), random(rows, classes), folded


@pytest.fixture
def always(monkeypatch):
    """Sends inputs of any size to the compiled kernels."""
    monkeypatch.setattr(dispatch, "WORTH_A_KERNEL", 0)


@pytest.fixture
def set_threads():
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
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_kernel_agrees_with_its_definition(
    always, rows, width, classes, dtype, divide, given_classes, seed
):
    features, logits, folded = problem(rows, width, classes, dtype, seed)
    predicted = logits.argmax(dim=1)
    how = {"predicted": predicted} if given_classes else {"logits": logits}
    scores = kernels.folded_score(features, folded, divide, **how)
    expected = dispatch.plain_score(features, predicted, folded, divide)
    # 1e-6 relative to the terms that are summed: their sum may be arbitrarily close to 0.
    normals, offsets, center, _ = folded
    deviation = features - center
    size = (normals[predicted] * deviation).abs().sum(dim=1) + offsets[predicted].abs()
    if divide:
        size = size / deviation.norm(dim=1).clamp_min(1e-6)
    assert scores.dtype == dtype
    assert scores.shape == (rows,)
    assert ((scores - expected).abs() <= (1e-6 if dtype == torch.float32 else 1e-14) * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 2, 64, 65, 128, 129, 1000, 70_000])
def test_the_argmax_is_torchs_whatever_the_ties_and_signs(always, classes, dtype):
    width = 3
    g = torch.Generator().manual_seed(classes)
    # Few distinct values: maxima repeat within and across pieces, among them both zeros and
    # negative rows.
    logits = torch.randint(-3, 2, (400, classes), generator=g).to(dtype)
    logits[::2] -= 2
    # −0 and +0 as maxima.
    logits[1::4][torch.rand(100, classes, generator=g) < 0.5] *= 0.0
    logits[0], logits[1, :], logits[1, -1] = -0.0, -0.0, 0.0
    logits[2] = torch.finfo(dtype).min
    logits[3] = -torch.arange(classes).to(dtype)
    logits[4] = torch.arange(classes).to(dtype)
    features = torch.zeros(400, width, dtype=dtype)
    offsets = torch.arange(classes).to(dtype)
    folded = (torch.zeros(classes, width, dtype=dtype), offsets, features[0], features[0, 0])
    scores = kernels.folded_score(features, folded, False, logits=logits)
    assert torch.equal(scores.long(), logits.argmax(dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("classes", [2, 300])
@pytest.mark.parametrize("least", [0, 1 << 30], ids=["kernel", "plain"])
def test_one_bad_logit_or_feature_anywhere_makes_its_row_nan_and_no_other(
    monkeypatch, least, classes, bad, dtype
):
    monkeypatch.setattr(dispatch, "WORTH_A_KERNEL", least)
    features, logits, folded = problem(20, 37, classes, dtype)
    logits[3, 0] = logits[7, classes // 2] = logits[11, classes - 1] = bad
    features[5, 0] = features[13, 36] = bad
    scores = kernels.folded_score(features, folded, True, logits=logits)
    assert scores.isnan().nonzero()[:, 0].tolist() == [3, 5, 7, 11, 13]


@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 1e16), (torch.float64, 1e150)])
@pytest.mark.parametrize("least", [0, 1 << 30], ids=["kernel", "plain"])
def test_a_row_whose_norm_overflows_is_nan(monkeypatch, least, dtype, huge):
    monkeypatch.setattr(dispatch, "WORTH_A_KERNEL", least)
    features, logits, folded = problem(3, 8, 4, dtype)
    features[1, 2] = huge
    scores = kernels.folded_score(features, folded, True, logits=logits)
    assert scores.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
@pytest.mark.parametrize("rows", [3, 70_000])
def test_a_class_that_the_head_does_not_have_is_an_error(bad, rows):
    features, _, folded = problem(rows, 8, 4)
    predicted = torch.zeros(rows, dtype=torch.int64)
    predicted[rows // 2] = bad
    with pytest.raises(IndexError, match=r"outside 0…3"):
        kernels.folded_score(features, folded, True, predicted=predicted)


def test_shapes_that_do_not_fit_are_refused_before_memory_is_touched():
    features, logits, folded = problem(5, 8, 4)
    with pytest.raises(ValueError, match=r"features have shape \(5, 7\), expected \(5, 8\)"):
        kernels.folded_score(features[:, :7], folded, True, logits=logits)
    with pytest.raises(ValueError, match=r"logits have shape \(4, 4\), expected \(5, 4\)"):
        kernels.folded_score(features, folded, True, logits=logits[:4])
    with pytest.raises(ValueError, match=r"predicted classes have shape \(4,\), expected \(5,\)"):
        kernels.folded_score(features, folded, True, predicted=torch.zeros(4))
    normals, offsets, center, floor = folded
    with pytest.raises(ValueError, match=r"offsets have shape \(3,\), expected \(4,\)"):
        kernels.folded_score(features, (normals, offsets[:3], center, floor), True, logits=logits)


def test_strided_transposed_and_small_integer_inputs_score_like_their_copies(always):
    features, logits, folded = problem(30, 16, 5)
    expected = kernels.folded_score(features, folded, True, logits=logits)
    strided = torch.zeros(60, 32)
    strided[::2, ::2] = features
    scores = kernels.folded_score(strided[::2, ::2], folded, True, logits=logits.T.contiguous().T)
    assert torch.equal(scores, expected)
    predicted = logits.argmax(dim=1).to(torch.uint8)
    assert torch.equal(kernels.folded_score(features, folded, True, predicted=predicted), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_another_dtype_give_the_classes_that_they_say(always, dtype):
    features, logits, folded = problem(30, 16, 5)
    logits = logits.to(dtype)
    logits[4, 1] = torch.inf
    scores = kernels.folded_score(features, folded, True, logits=logits)
    expected = dispatch.plain_score(features, logits.argmax(dim=1), folded, True)
    expected[4] = torch.nan
    torch.testing.assert_close(scores, expected, equal_nan=True)


# Threads


def large(dtype=torch.float32):
    return problem(6000, 96, 40, dtype, seed=5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_digit_depends_on_the_number_of_threads(set_threads, always, dtype):
    features, logits, folded = large(dtype)
    results = []
    for count in (1, 2, 3):
        set_threads(count)
        scores = kernels.folded_score(features, folded, True, logits=logits)
        results.append((scores, kernels.column_sums(features)))
    for scores, sums in results[1:]:
        assert torch.equal(scores, results[0][0])
        assert torch.equal(sums, results[0][1])


def test_each_row_is_scored_by_itself(always):
    features, logits, folded = problem(23, 64, 40)
    together = kernels.folded_score(features, folded, True, logits=logits)
    alone = [
        kernels.folded_score(features[i : i + 1], folded, True, logits=logits[i : i + 1])
        for i in range(23)
    ]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shared_parts_are_each_done_once_by_at_most_as_many_threads_as_torch_has(
    set_threads, count
):
    set_threads(count)
    done = []
    workers = set()
    barrier = threading.Barrier(min(count, 3))

    def work(start, stop):
        if start == 0 or len(workers) < barrier.parties:
            workers.add(threading.get_ident())
        done.append((start, stop))

    threads.share(threads.spans(1001, 10), work)
    assert sorted(done) == [(start, min(start + 10, 1001)) for start in range(0, 1001, 10)]
    assert len(workers) <= count


@pytest.mark.parametrize("failing", [0, 90])
def test_an_error_in_one_thread_is_raised_when_no_other_is_at_work(set_threads, failing):
    set_threads(3)
    at_work = []

    def work(start, _stop):
        if start == failing:
            raise KeyError(start)
        at_work.append(start)
        at_work.remove(start)

    with pytest.raises(KeyError):
        threads.share(threads.spans(100, 10), work)
    assert not at_work


def test_a_thread_that_outlives_the_main_one_still_scores():
    code = (
        "import threading, time, torch, fdbd\n"
        "torch.set_num_threads(2)\n"
        "def late():\n"
        "    time.sleep(1)\n"
        "    batch = fdbd.Batch(torch.randn(20_000, 64))\n"
        "    print(fdbd.FDBD().fit(batch, fdbd.Head(torch.randn(2, 64))).score(batch).shape)\n"
        "threading.Thread(target=late).start()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "torch.Size([20000])" in run.stdout, run.stderr


def test_eight_python_threads_at_once_get_what_one_gets(always):
    problems = [problem(2000 + 100 * i, 80, 30, seed=i) for i in range(8)]

    def work(index):
        features, logits, folded = problems[index]
        return kernels.folded_score(features, folded, True, logits=logits), kernels.column_sums(
            features
        )

    expected = [work(index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for index, (scores, sums) in zip(list(range(8)) * 10, pool.map(work, list(range(8)) * 10)):
            assert torch.equal(scores, expected[index][0])
            assert torch.equal(sums, expected[index][1])


# What takes the definition in plain torch


def reaches_kernel(monkeypatch, features, folded, **how):
    """Whether scores of these tensors come from the compiled kernel."""
    entered = []
    run = dispatch._run_score
    monkeypatch.setattr(
        dispatch, "_run_score", lambda *arguments: (entered.append(1), run(*arguments))[1]
    )
    kernels.folded_score(features, folded, True, **how)
    monkeypatch.setattr(dispatch, "_run_score", run)
    return bool(entered)


def test_large_plain_tensors_reach_the_kernel_and_small_ones_do_not(monkeypatch):
    rows = dispatch.WORTH_A_KERNEL // 64
    features, logits, folded = problem(rows, 64, 4)
    assert reaches_kernel(monkeypatch, features, folded, logits=logits)
    assert reaches_kernel(monkeypatch, torch.nn.Parameter(features, False), folded, logits=logits)
    assert not reaches_kernel(monkeypatch, features[1:], folded, logits=logits[1:])


def test_tensors_that_record_gradients_do_not(monkeypatch, always):
    features, logits, folded = problem(5, 8, 4)
    features.requires_grad_()
    assert not reaches_kernel(monkeypatch, features, folded, logits=logits)
    with torch.no_grad():
        assert reaches_kernel(monkeypatch, features, folded, logits=logits)
    with torch.inference_mode():
        assert reaches_kernel(monkeypatch, features, folded, logits=logits)


def test_half_precision_meta_and_subclass_tensors_do_not():
    features, logits, _ = problem(5, 8, 4)
    assert not is_plain(features.half())
    assert not is_plain(features.to("meta"))
    assert not is_plain(features, logits.double())

    class Special(torch.Tensor):
        pass

    assert not is_plain(features.as_subclass(Special))


def test_negated_views_are_scored_by_their_value(always):
    # A lazy −: the memory holds the opposite.
    imaginary = torch.complex(torch.zeros(4, 8), torch.randn(4, 8)).conj().imag
    assert imaginary.is_neg()
    _, logits, folded = problem(4, 8, 3)
    scores = kernels.folded_score(imaginary, folded, True, logits=logits)
    expected = kernels.folded_score(imaginary.resolve_neg().clone(), folded, True, logits=logits)
    assert torch.allclose(scores, expected)


@pytest.mark.filterwarnings("ignore")
def test_recorded_graphs_hold_the_computation_and_not_its_result(always):
    features, logits, folded = problem(5, 8, 4)
    others, other_logits, _ = problem(5, 8, 4, seed=1)
    expected = kernels.folded_score(others, folded, True, logits=other_logits)

    def score(z, outputs):
        return kernels.folded_score(z, folded, True, logits=outputs)

    for record in (
        lambda: torch.jit.trace(score, (features, logits)),
        lambda: make_fx(score)(features, logits),
        lambda: torch.compile(score, fullgraph=True, backend="eager"),
    ):
        torch.testing.assert_close(record()(others, other_logits), expected)
    torch.testing.assert_close(
        torch.func.vmap(lambda z, y: score(z[None], y[None])[0])(others, other_logits), expected
    )


def test_forward_mode_derivatives_agree_with_finite_differences(always):
    features, logits, folded = problem(5, 8, 4, torch.float64)
    direction = torch.randn_like(features)

    def score(z):
        return kernels.folded_score(z, folded, True, logits=logits)

    # torch parses its own source, and CPython 3.11 fails where a collection interrupts (gh-106905)
    gc.disable()
    try:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(features, direction)
            tangent = torch.autograd.forward_ad.unpack_dual(score(dual)).tangent
    finally:
        gc.enable()
    numeric = (score(features + 1e-6 * direction) - score(features - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close(tangent, numeric, rtol=1e-6, atol=1e-8)


def test_the_default_device_of_the_program_does_not_matter(always):
    features, logits, folded = problem(5, 8, 4)
    expected = (
        kernels.folded_score(features, folded, True, logits=logits),
        kernels.column_sums(features),
    )
    with torch.device("meta"):
        assert torch.equal(kernels.folded_score(features, folded, True, logits=logits), expected[0])
        assert torch.equal(kernels.column_sums(features), expected[1])


# Sums over rows


@given(
    rows=st.integers(0, 700),
    width=st.integers(0, 40),
    dtype=st.sampled_from([*DTYPES, torch.float16, torch.bfloat16]),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_column_sums_are_those_of_float64(always, rows, width, dtype):
    features = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
    expected = np.array(
        [sum(float(value) for value in column) for column in features.double().numpy().T]
    )
    np.testing.assert_allclose(
        kernels.column_sums(features).numpy(), expected, rtol=1e-12, atol=1e-12
    )


def test_column_sums_of_a_large_strided_matrix_are_those_of_float64(always):
    features = torch.randn(3000, 200, generator=torch.Generator().manual_seed(0))[:, ::2]
    torch.testing.assert_close(
        kernels.column_sums(features), features.double().sum(dim=0), rtol=0, atol=1e-10
    )


# Compilation

LARGE_BATCH = """
import sys, torch, fdbd
from fdbd.kernels import dispatch
batch = fdbd.Batch(torch.randn(9000, 64))
detector = fdbd.FDBD().fit(batch, fdbd.Head(torch.randn(3, 64)))
scores = detector.score(batch)
predicted = (batch.features @ detector.head_weight.T + detector.head_bias).argmax(dim=1)
folded = [getattr(detector, name) for name in ("normals", "offsets", "center", "floor")]
torch.testing.assert_close(scores, dispatch.plain_score(batch.features, predicted, folded, True), rtol=1e-4, atol=1e-5)
"""


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.split()


def test_without_a_compiler_the_definitions_answer():
    code = LARGE_BATCH + "print(dispatch._compiled(), 'numba' in sys.modules)"
    assert run_python(code, NUMBA_DISABLE_JIT="1") == ["None", "False"]


@pytest.mark.slow
def test_machine_code_is_kept_on_disk_for_the_next_process(tmp_path):
    code = (
        LARGE_BATCH
        + "for kernel in (dispatch._compiled().score_rows, dispatch._compiled().add_rows):\n"
        "    print(sum(kernel.compiled.stats.cache_hits.values()))"
    )
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["0", "0"]
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["1", "1"]


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_written_changes_no_answer(tmp_path):
    blocked = tmp_path / "file"
    # A file where the folder should be: nothing can be created below it.
    blocked.write_text("")
    assert run_python(LARGE_BATCH + "print('scored')", NUMBA_CACHE_DIR=str(blocked / "cache")) == [
        "scored"
    ]


def test_without_a_cache_folder_threads_share_one_compilation(monkeypatch):
    from numba.core import caching

    from fdbd.kernels import compiled

    def no_folder(*_):
        # Other threads go on.
        time.sleep(0.05)
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(caching.FunctionCache, "__init__", no_folder)
    kernel = compiled.Kernel(compiled.add_rows.function)
    made = []
    make = kernel._compile
    monkeypatch.setattr(kernel, "_compile", lambda cache: made.append(cache) or make(cache))
    sums = np.zeros((4, 2))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda row: kernel(np.ones((3, 2), np.float32), row), sums))
    # One with a cache, then one without.
    assert len(made) <= 2
    assert (sums == 3).all()


def test_a_cache_folder_that_fills_up_means_compiling_without_it(monkeypatch):
    from fdbd.kernels import compiled

    def full(*_):
        raise OSError(28, "No space left on device")

    kernel = compiled.Kernel(compiled.add_rows.function)
    kernel.compiled = full
    sums = np.zeros(2)
    kernel(np.ones((3, 2), np.float32), sums)
    assert sums.tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divide", [True, False])
def test_a_few_rows_score_as_the_definition_says(dtype: torch.dtype, divide: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    folded = (normal(5, 12), normal(5), normal(12), torch.tensor(1e-3, dtype=dtype))
    features = normal(9, 12)
    logits = normal(9, 5)
    logits[2, 1] = torch.nan
    logits[3, 4] = -torch.inf
    features[5] = torch.inf
    features[6] = 1e20 if dtype == torch.float32 else 1e150
    found = kernels.folded_score(features, folded, divide, logits=logits)
    expected = dispatch.plain_score(features, logits.argmax(dim=1), folded, divide)
    expected[[2, 3]] = torch.nan
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.isnan().nonzero()[:, 0].tolist() == [2, 3, 5, 6]


def test_an_infinite_logit_is_noticed_in_any_piece_of_a_large_array() -> None:
    logits = torch.randn(3000, 400)
    features = torch.randn(3000, 300)
    folded = (torch.randn(400, 300), torch.randn(400), torch.randn(300), torch.tensor(1e-3))
    for row, bad in ((0, -torch.inf), (1700, torch.nan), (2999, torch.inf)):
        broken = logits.clone()
        broken[row, 7] = bad
        scores = kernels.folded_score(features, folded, True, logits=broken)
        assert scores.isnan().nonzero()[:, 0].tolist() == [row]
