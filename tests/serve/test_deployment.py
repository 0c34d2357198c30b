"""The files around the service are valid where they will be used: Prometheus, Grafana, Kubernetes
and KServe."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import app_of, client_of

FOLDER = Path(__file__).parents[2] / "deployment"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)
def test_the_alert_rules_pass_prometheus_own_check() -> None:
    found = subprocess.run(
        ["promtool", "check", "rules", FOLDER / "prometheus-rules.yaml"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert "4 rules found" in found.stdout


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)
def test_every_query_of_the_dashboard_is_a_valid_rule(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    rules = [
        {"record": f"fdbd:query{index}", "expr": query.replace("$job", ".*")}
        for index, query in enumerate(queries)
    ]
    (tmp_path / "rules.json").write_text(
        json.dumps({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    found = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.json"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_rules_and_dashboard_ask_for_metrics_that_the_service_has(features) -> None:
    with client_of(app_of(features)) as client:
        client.post("/decide", json={"features": [[0.5] * features.row_shape[0]]})
        offered = set(re.findall(r"^# TYPE (\w+)", client.get("/metrics").text, re.MULTILINE))
    rules = (FOLDER / "prometheus-rules.yaml").read_text(encoding="utf-8")
    asked = set(re.findall(r"\bfdbd_\w+", rules + json.dumps(DASHBOARD["panels"])))
    assert len(asked) > 8
    for name in asked:
        assert name in offered or re.sub(r"_(bucket|sum|count)$", "", name) in offered, name


def test_the_metrics_are_as_prometheus_wants_them(features) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    with client_of(app_of(features)) as client:
        client.post("/decide", json={"features": [[0.5] * features.row_shape[0]]})
        text = client.get("/metrics").content
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert found.returncode == 0, found.stderr.decode()


def test_the_manifests_are_valid_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))
    assert [document["kind"] for document in documents] == ["Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, "1.28", strict=True)
    predictor = yaml.safe_load((FOLDER / "kserve.yaml").read_text(encoding="utf-8"))["spec"][
        "predictor"
    ]
    containers = {"containers": predictor["containers"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "guard"}, "spec": containers}
    kubernetes_validate.validate(pod, "1.28", strict=True)


def test_the_kserve_manifest_is_an_inference_service() -> None:
    """Against KServe's own models, where its package is installed."""
    yaml, kserve = pytest.importorskip("yaml"), pytest.importorskip("kserve")
    document = yaml.safe_load((FOLDER / "kserve.yaml").read_text(encoding="utf-8"))
    predictor = dict(document["spec"]["predictor"])
    known = set(kserve.V1beta1PredictorSpec.attribute_map.values())
    assert set(predictor) <= known
    assert (document["apiVersion"], document["kind"]) == (
        "serving.kserve.io/v1beta1",
        "InferenceService",
    )
