"""A guard that is loaded or fitted before its process forks: children answer, and none hangs.

Each case runs in a fresh interpreter, so that a child that hangs is a test that times out and not a
suite that does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

import fdbd

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

MODEL = """
import os, sys, threading, torch, fdbd
torch.manual_seed(0)
def threads():
    return len(os.listdir("/proc/self/task"))
model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
images = torch.randn(2000, 8)  # large enough for several threads
"""


@pytest.fixture(scope="module")
def guard_file(tmp_path_factory):
    """A guard of the model above whose buffers are large enough for torch to copy them with several
    threads."""
    path = tmp_path_factory.mktemp("guard") / "guard.safetensors"
    names: dict = {}
    exec(MODEL, names)
    fdbd.Guard(names["model"], "knn").fit([names["images"]]).calibrate([torch.randn(2000, 8)]).save(
        path
    )
    return path


def python(code, *arguments, timeout=100, **environment):
    """What a fresh interpreter prints."""
    run = subprocess.run(
        [sys.executable, "-c", MODEL + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_loading_a_guard_starts_no_thread_and_compiles_nothing(guard_file):
    code = (
        "import time\nbefore = threads()\nfdbd.load(sys.argv[1], model)\nfor _ in range(100):  #"
        " OpenMP's threads end a moment after the one that they were started for\n   "
        " time.sleep(0.1 * (threads() > before))\nprint(threads() - before, 'numba' in sys.modules)"
    )
    assert python(code, guard_file) == ["0", "False"]


LOAD = "guard = fdbd.load(sys.argv[1], model)\n"
SCORE_THEN_LOAD = (
    "(images @ images.T).sum(); torch.randn(3000, 64).sum()\n" + LOAD + "guard(images)\n"
)
FIT = "guard = fdbd.Guard(model).fit([images]).calibrate([torch.randn(500, 8)])\n"


@pytest.mark.parametrize("before", [LOAD, SCORE_THEN_LOAD, FIT], ids=["loaded", "scored", "fitted"])
def test_a_forked_child_decides_as_its_parent_does(guard_file, before):
    code = (
        before + "import multiprocessing\ndef answer(sender):\n   "
        " sender.send(guard(images).scores.tolist())\nreceiver, sender ="
        " multiprocessing.Pipe(duplex=False)\nchild ="
        " multiprocessing.get_context('fork').Process(target=answer, args=(sender,),"
        " daemon=True)\nchild.start()\nassert receiver.poll(60), 'the child hangs'\nscores ="
        " torch.tensor(receiver.recv())\nchild.join(60)\ntorch.testing.assert_close(scores,"
        " guard(images).scores, rtol=1e-4, atol=1e-5)\nprint('agreed', torch.get_num_threads())"
    )
    assert python(code, guard_file) == ["agreed", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_score_with_a_guard_of_their_parent(
    guard_file, tmp_path, method
):
    script = tmp_path / "workers.py"
    script.write_text(
        MODEL + "guard = None\ndef score(rows):\n    global guard\n    guard = guard or"
        " fdbd.load(sys.argv[1], model)\n    return guard.score(rows).tolist()\nif __name__ =="
        " '__main__':\n    import multiprocessing\n    expected = torch.tensor(score(images))\n "
        f"   with multiprocessing.get_context('{method}').Pool(2) as pool:\n        found ="
        " pool.map_async(score, images.split(500)).get(90)\n   "
        " torch.testing.assert_close(torch.tensor(sum(found, [])), expected, rtol=1e-4,"
        " atol=1e-5)\n    print('agreed')\n"
    )
    run = subprocess.run(
        [sys.executable, str(script), str(guard_file)], capture_output=True, text=True, timeout=150
    )
    assert run.stdout.split() == ["agreed"], run.stderr


@pytest.mark.slow
def test_workers_of_a_data_loader_score_with_a_guard_that_was_loaded_before(guard_file):
    code = (
        SCORE_THEN_LOAD + "class Scored(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return guard(images).scores[i]\n"
        "loader = torch.utils.data.DataLoader(Scored(), batch_size=4, num_workers=2, timeout=60)\n"
        "found = torch.cat(list(loader))\n"
        "torch.testing.assert_close(found, guard(images).scores[:8], rtol=1e-4, atol=1e-5)\n"
        "print('agreed')"
    )
    assert python(code, guard_file) == ["agreed"]


@pytest.mark.slow
def test_gunicorn_answers_from_workers_when_the_guard_is_loaded_before_they_are_forked(
    guard_file, tmp_path
):
    pytest.importorskip("gunicorn")
    # The service warms up before it forks.
    (tmp_path / "service.py").write_text(
        MODEL + f"guard = fdbd.load({str(guard_file)!r}, model)\n"
        "guard(images)\n"
        "def app(environ, start_response):\n"
        "    import json\n"
        "    answer = json.dumps({'pid': os.getpid(), 'score':"
        " guard(images).scores[0].item()}).encode()\n"
        "    start_response('200 OK', [('Content-Length', str(len(answer)))])\n"
        "    return [answer]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gunicorn",
            "--preload",
            "--workers",
            "2",
            "--bind",
            f"127.0.0.1:{port}",
            "service:app",
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        stderr=subprocess.DEVNULL,
    )
    try:
        answers = []
        deadline = time.monotonic() + 90
        while len(answers) < 8:
            assert time.monotonic() < deadline, f"{len(answers)} answers within 90 seconds"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=20) as response:
                    answers.append(json.load(response))
            except (ConnectionError, urllib.error.URLError):
                # Not listening yet.
                time.sleep(0.3)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert server.pid not in {answer["pid"] for answer in answers}
    assert (
        max(answer["score"] for answer in answers) - min(answer["score"] for answer in answers)
        < 1e-4
    )
