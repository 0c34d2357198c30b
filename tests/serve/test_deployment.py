"""The files around the service are valid where they will be used: Prometheus, Grafana, Kubernetes
and KServe."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

import fdbd

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
    assert "6 rules found" in found.stdout


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
    kinds = [document["kind"] for document in documents]
    claim = "PersistentVolumeClaim"
    assert kinds == [claim, claim, "Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, "1.28", strict=True)
    predictor = yaml.safe_load((FOLDER / "kserve.yaml").read_text(encoding="utf-8"))["spec"][
        "predictor"
    ]
    containers = {"containers": predictor["containers"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "guard"}, "spec": containers}
    kubernetes_validate.validate(pod, "1.28", strict=True)


def documents_of(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def containers() -> dict[str, dict[str, Any]]:
    (deployment,) = [d for d in documents_of("kubernetes.yaml") if d["kind"] == "Deployment"]
    (predictor,) = documents_of("kserve.yaml")
    return {
        "kubernetes": deployment["spec"]["template"]["spec"]["containers"][0],
        "kserve": predictor["spec"]["predictor"]["containers"][0],
    }


def options_of(container: dict[str, Any]) -> dict[str, str]:
    return dict(arg[2:].partition("=")[::2] for arg in container["args"][1:])


@pytest.mark.parametrize("name", ["kubernetes", "kserve"])
def test_the_memory_of_a_container_is_what_the_service_is_told_and_probes_fit_its_answers(
    name: str,
) -> None:
    container = containers()[name]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024**3
    told = int(options_of(container)["memory"]) * 1_000_000
    assert 0.85 * limit < told < 0.95 * limit
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"


def test_what_the_deployment_names_is_there() -> None:
    documents = documents_of("kubernetes.yaml")
    by_kind = {document["kind"]: document for document in documents}
    claims = {d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    pod = by_kind["Deployment"]["spec"]["template"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
    container = containers()["kubernetes"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    options = options_of(container)
    annotations = pod["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == options["metrics-port"] == str(ports["metrics"])
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert set(volumes) == {mount["name"] for mount in mounts.values()}
    for written in ("state", "decisions"):
        folder = "/" + options[written].split("/")[1]
        assert not mounts[folder].get("readOnly"), written
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace > float(options["timeout"]) + 5
    assert {port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]} <= set(ports)


def test_the_list_of_the_slim_image_is_that_of_the_extras() -> None:
    """What pyproject.toml asks for an ONNX guard, without what only torch needs."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    of_torch = {"torch", "safetensors", "numba", "scipy", "scikit-learn"}
    extras = project["optional-dependencies"]
    wanted = set()
    for line in [*project["dependencies"], *extras["serve"], *extras["onnx-runtime"]]:
        if re.split("[^a-zA-Z0-9-]", line)[0] not in of_torch:
            wanted.add(line.replace(" ", ""))
    text = (FOLDER / "requirements-onnx.txt").read_text(encoding="utf-8")
    listed = {line.replace(" ", "") for line in text.splitlines() if not line.startswith("#")}
    assert listed == wanted


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the image is Linux")
def test_the_slim_image_serves_with_the_arguments_of_the_manifest(
    feature_guard, tmp_path: Path
) -> None:
    """What the Containerfile does, in a virtual environment: install, start, scrape, stop."""
    pytest.importorskip("onnxscript")
    environment = tmp_path / "image"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    for given in (["-r", FOLDER / "requirements-onnx.txt"], ["--no-deps", FOLDER.parent]):
        built = subprocess.run(
            [python, "-m", "pip", "install", "-q", *given], capture_output=True, text=True
        )
        if built.returncode:
            pytest.skip(f"the packages cannot be installed: {built.stderr.strip()[-200:]}")
    has_torch = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert has_torch.returncode != 0, "the slim image has torch"
    feature_guard.export_onnx(tmp_path / "guard.onnx", fdbd.Batch(torch.randn(3, 6)))
    (tmp_path / "token").write_text("a-token-of-enough-letters")
    ports = [free_port(), free_port()]
    arguments = [f"--port={ports[0]}"]
    for arg in containers()["kubernetes"]["args"]:
        arg = arg.replace("/guard/", f"{tmp_path}/").replace("/token/", f"{tmp_path}/")
        arg = arg.replace("=/state/", f"={tmp_path}/").replace("=9090", f"={ports[1]}")
        arguments.append(arg.replace("0.0.0.0", "127.0.0.1"))
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    service = subprocess.Popen(
        [environment / "bin" / "fdbd", "serve", *arguments],
        cwd=tmp_path,
        env=bare,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with fdbd.Client(
            f"http://127.0.0.1:{ports[0]}", "a-token-of-enough-letters", timeout=60
        ) as client:
            decisions = client.decide_features([[0.1] * 6])
        expected = feature_guard.decide(fdbd.Batch(torch.full((1, 6), 0.1)))
        assert decisions[0]["score"] == pytest.approx(float(expected.scores[0]), rel=1e-4)
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/metrics") as scraped:
            assert feature_guard.id in scraped.read().decode()
        service.terminate()
        assert service.wait(40) in (0, -15)
    finally:
        service.kill()
    (records,) = (tmp_path / "decisions").glob("*.jsonl")
    assert json.loads(records.read_text())["guard"] == feature_guard.id
    assert list((tmp_path / "monitor").glob("slot-0.json"))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_kserve_manifest_is_an_inference_service() -> None:
    """Against KServe's own models, where its package is installed."""
    yaml = pytest.importorskip("yaml")
    kserve = pytest.importorskip("kserve")
    document = yaml.safe_load((FOLDER / "kserve.yaml").read_text(encoding="utf-8"))
    predictor = dict(document["spec"]["predictor"])
    known = set(kserve.V1beta1PredictorSpec.attribute_map.values())
    assert set(predictor) <= known
    assert (document["apiVersion"], document["kind"]) == (
        "serving.kserve.io/v1beta1",
        "InferenceService",
    )
