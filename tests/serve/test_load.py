"""The service under load with faults, and under a machine that reads its own description of the
interface."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fdbd.serve.settings import Settings

from .conftest import app_of

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_whatever_clients_send_the_service_keeps_its_bounds() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "serving_faults.py"
    found = subprocess.run(
        [sys.executable, script, "--quick"], capture_output=True, text=True, timeout=590
    )
    assert found.returncode == 0, found.stdout + found.stderr
    summary = json.loads(found.stdout)
    assert len(summary["rows"]) >= 13
    assert summary["rows"]["load_with_kills"]["answers"] > 100
    assert summary["rows"]["load_with_kills"]["kills"] >= 1


@pytest.mark.parametrize("kind", ["features", "images"])
def test_what_schemathesis_makes_of_the_interface_is_never_answered_with_500(
    kind: str, request
) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings

    # The name by which schemathesis asks an application.
    by_name = Settings(allowed_hosts=("testserver",))
    app = app_of(request.getfixturevalue(kind), by_name)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    tried = 0
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        def check(case) -> None:
            answer = case.call()
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            assert "Traceback" not in answer.text

        check()
        tried += 1
    assert tried > 5
