"""The manifests of configs/kubernetes.

Built-in kinds are validated strictly by the schemas of the package `kubernetes-validate`. The
custom kinds (KEDA, KServe, Ray) and the kubelet's configuration have no schema there, and no
cluster has accepted them: only their shape is checked, and the containers in them as those of a
Pod. Settings, ports, sizes, times and metrics must agree with the server's. The Pods are replayed
without a cluster.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from support import container, models
from support.container import Container, Image, Pod, documents, running
from support.models import ROOT
from support.processes import BIN, eventually
from support.processes import running as gateway_running

from iskander.config.loader import load_config
from iskander.config.schema import Config
from iskander.gateway.server import GRACE_S
from iskander.gateway.supervision.supervisor import STOP_S
from iskander.gateway.telemetry.metrics import exposition as metrics

FOLDER = ROOT / "configs" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
PARSED = [(path, document) for path in FILES for document in documents(path)]
CUSTOM = {
    "ScaledObject": "keda.sh/v1alpha1",
    "ServingRuntime": "serving.kserve.io/v1alpha1",
    "InferenceService": "serving.kserve.io/v1beta1",
    "RayJob": "ray.io/v1",
    "KubeletConfiguration": "kubelet.config.k8s.io/v1beta1",
}
BUILT_IN = [each for _, each in PARSED if each["kind"] not in CUSTOM]
NAMES = [f"{p.parent.name}-{each['kind']}" for p, each in PARSED if each["kind"] not in CUSTOM]
VERSION = "1.37"
KILL_S = 1.0
PROCESS_BYTES = 150 << 20
SIZES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
NUMA_NODES = 2
NEEDS_ROOT = pytest.mark.skipif(bool(container.why_not()), reason=container.why_not())
SHARED = """
import pyarrow as pa
from iskander.client import Client

with Client("unix:/sockets/flight.sock", shared_bytes=1 << 24) as client:
    batch = pa.record_batch({"x": pa.array(range(400_000), pa.int64())})
    results = client.stream("ids", iter([batch, batch]))
    first = next(results)
    regions = client.stats()["shared_memory"]["regions"]
    print(first["y"][399_999].as_py(), regions, len(list(results)))
"""


def of_kind(kind: str, folder: str = "") -> dict[str, Any]:
    """The only document of a kind in a folder."""
    (found,) = (
        each
        for path, each in PARSED
        if each["kind"] == kind and (not folder or path.parent.name == folder)
    )
    return found


def file_of(folder: str) -> str:
    """The server's configuration in the ConfigMap of a folder."""
    text: str = of_kind("ConfigMap", folder)["data"]["iskander.toml"]
    return text


def config_of(folder: str, tmp_path: Path) -> Config:
    file = tmp_path / "iskander.toml"
    file.write_text(file_of(folder))
    return load_config(file, environment={}).config


def validate(document: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(document, VERSION, strict=True)


def is_valid(document: dict[str, Any]) -> bool:
    schemas = pytest.importorskip("kubernetes_validate")
    try:
        validate(document)
    except schemas.ValidationError:
        return False
    return True


def as_pod(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def pod_spec(folder: str) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("Deployment", folder)["spec"]["template"]["spec"]
    return spec


def container_of(spec: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (
        each
        for each in [*spec.get("initContainers", ()), *spec["containers"]]
        if each["name"] == name
    )
    return dict(found)


def size(text: str) -> int:
    return int(text[:-2]) * SIZES[text[-2:]]


@pytest.mark.parametrize("document", BUILT_IN, ids=NAMES)
def test_built_in_kinds_fit_their_schemas(document: dict[str, Any]) -> None:
    validate(document)


@pytest.mark.parametrize("document", BUILT_IN, ids=NAMES)
def test_an_unknown_field_is_found(document: dict[str, Any]) -> None:
    """At the top, and in the container of a Deployment."""
    pytest.importorskip("kubernetes_validate")
    copied = yaml.safe_load(yaml.safe_dump(document)) | {"replica": 2}
    assert not is_valid(copied)
    if document["kind"] == "Deployment":
        del copied["replica"]
        copied["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
        assert not is_valid(copied)


def test_every_file_is_known_and_no_other_kind_is_used() -> None:
    kinds = {(each["kind"], each["apiVersion"]) for _, each in PARSED}
    assert {(kind, version) for kind, version in kinds if kind in CUSTOM} == set(CUSTOM.items())
    assert {"Deployment", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"} <= {
        kind for kind, _ in kinds
    }
    images = set(re.findall(r"image: (\S+)", "".join(path.read_text() for path in FILES)))
    assert images == {"iskander:0.2.0", "application:1.0", "ray-iskander:2.60.0"}


@pytest.mark.parametrize("folder", ["server", "sidecar"])
def test_configmap_passes_the_check(folder: str, tmp_path: Path) -> None:
    """`iskander check`, with a model in the repository."""
    models.row_ids(tmp_path / "models" / "ids" / "1")
    # The folder of the sockets must exist.
    text = file_of(folder).replace("/sockets/", f"{tmp_path}/")
    (tmp_path / "iskander.toml").write_text(text)
    override = f"repository.path={tmp_path / 'models'}"
    check = [str(BIN / "iskander"), "check", str(tmp_path / "iskander.toml"), "--set", override]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ids/1" in done.stdout


@pytest.mark.parametrize("folder", ["server", "sidecar"])
def test_memory_limit_covers_arenas_buffers_and_processes(folder: str, tmp_path: Path) -> None:
    """On two NUMA nodes; at least a quarter is left for the models."""
    config, spec = config_of(folder, tmp_path), pod_spec(folder)
    limit = size(container_of(spec, "iskander")["resources"]["limits"]["memory"])
    workers = config.workers.count or NUMA_NODES
    arenas = config.arena.input_bytes + workers * config.arena.output_bytes
    used = config.server.processes * arenas + (config.limits.receive_bytes or limit // 8)
    # The gateway, the workers, and a sandbox process.
    used += (config.server.processes + workers + 1) * PROCESS_BYTES
    assert used <= 0.75 * limit
    if config.shared_memory.path:
        own = size(container_of(spec, "application")["resources"]["limits"]["memory"])
        assert config.shared_memory.total_bytes <= own // 2
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert config.loading.cache_bytes < size(volumes["state"]["emptyDir"]["sizeLimit"])


def stop_s(config: Config) -> float:
    """Time from SIGTERM to the exit."""
    return config.server.lame_duck_s + config.server.drain_s + GRACE_S + STOP_S + KILL_S


@pytest.mark.parametrize("folder", ["server", "sidecar"])
def test_grace_period_covers_the_drain(folder: str, tmp_path: Path) -> None:
    config, spec = config_of(folder, tmp_path), pod_spec(folder)
    hooks = container_of(spec, "iskander").get("lifecycle", {})
    assert not hooks, "a preStop hook is part of the grace period too"
    assert spec["terminationGracePeriodSeconds"] >= stop_s(config)


@pytest.mark.parametrize("folder", ["server", "sidecar"])
def test_pods_are_restricted_and_have_guaranteed_resources(folder: str) -> None:
    """The rules of the Pod security level `restricted`; static cpus need whole cpus."""
    spec = pod_spec(folder)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["enableServiceLinks"] and not spec["automountServiceAccountToken"]
    for each in [*spec["initContainers"], *spec["containers"]]:
        security = spec["securityContext"] | each["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]} and security["runAsUser"] > 0
        assert each["resources"]["requests"] == each["resources"]["limits"]
        assert each["resources"]["limits"]["cpu"].isdecimal()


def test_ports_agree_with_the_configuration(tmp_path: Path) -> None:
    config = config_of("server", tmp_path)
    served = container_of(pod_spec("server"), "iskander")
    ports = {each["name"]: each["containerPort"] for each in served["ports"]}
    (address,) = config.addresses
    assert address == f"0.0.0.0:{ports['grpc']}" and served["readinessProbe"]["grpc"] == {
        "port": ports["grpc"]
    }
    assert config.admin.address == f"0.0.0.0:{ports['admin']}"
    annotations = of_kind("Deployment", "server")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["admin"])
    service = of_kind("Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["port"] == ports["grpc"], "headless: no port is translated"
    labels = of_kind("Deployment", "server")["spec"]["template"]["metadata"]["labels"]
    for selected in (
        service["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selected == labels
    allowed = {rule["ports"][0]["port"] for rule in of_kind("NetworkPolicy")["spec"]["ingress"]}
    assert allowed == ports.keys()


def test_sidecar_has_no_tcp(tmp_path: Path) -> None:
    config, spec = config_of("sidecar", tmp_path), pod_spec("sidecar")
    assert not config.admin.address and not config.http.address and not config.inferential.address
    (address,) = config.addresses
    sidecar, application = (container_of(spec, name) for name in ("iskander", "application"))
    assert sidecar["restartPolicy"] == "Always" and "ports" not in sidecar
    assert application["env"] == [{"name": "ISKANDER_ADDRESS", "value": address}]
    for name in ("startupProbe", "readinessProbe"):
        assert sidecar[name]["exec"]["command"][-1] == address
    folder = str(Path(config.shared_memory.path).parent)
    assert folder == str(Path(address.removeprefix("unix:")).parent)
    (volume,) = (m["name"] for m in application["volumeMounts"] if m["mountPath"] == folder)
    assert {"name": volume, "mountPath": folder} in sidecar["volumeMounts"]


def queries() -> Iterator[tuple[str, str]]:
    """Name and PromQL of each query."""
    rules = yaml.safe_load(of_kind("ConfigMap", "autoscaling")["data"]["config.yaml"])["rules"]
    for rule in rules:
        yield rule["name"]["as"], rule["metricsQuery"]
        yield rule["name"]["as"], rule["seriesQuery"]
    for trigger in of_kind("ScaledObject")["spec"]["triggers"]:
        yield trigger["name"], trigger["metadata"]["query"]


def series() -> set[str]:
    """Every series that the server exports."""
    tables = [value for value in vars(metrics).values() if isinstance(value, tuple)]
    found = set()
    for metric in (each for table in tables for each in table):
        if isinstance(metric, metrics.Metric):
            ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
            found |= {metric.name + end for end in ends}
    return found


@pytest.mark.parametrize(("name", "query"), list(queries()))
def test_queries_use_existing_metrics(name: str, query: str) -> None:
    known = series()
    assert "iskander_wait_seconds_bucket" in known and len(known) > 60
    named = set(re.findall(r"iskander_\w+", query))
    assert named and named <= known, name


def test_queries_are_promql(tmp_path: Path) -> None:
    """By promtool, if it is installed: Debian package prometheus."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: Debian package prometheus")
    labels = {"<<.GroupBy>>": "pod", "<<.LabelMatchers>>": 'namespace="default"'}
    rules = []
    for index, (_, query) in enumerate(queries()):
        filled = re.sub("<<[.]\\w+>>", lambda found: labels[found[0]], query)
        rules.append({"record": f"query_{index}", "expr": filled})
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    check = ["promtool", "check", "rules", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_autoscalers_have_the_same_signals() -> None:
    """Thresholds in seconds; the metrics of the HPA are those of the adapter's rules."""
    spec = of_kind("HorizontalPodAutoscaler")["spec"]
    targets = {
        each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"]
        for each in spec["metrics"]
    }
    rules = yaml.safe_load(of_kind("ConfigMap", "autoscaling")["data"]["config.yaml"])["rules"]
    assert [rule["name"]["as"] for rule in rules] == list(targets)
    scaled = of_kind("ScaledObject")["spec"]
    thresholds = [each["metadata"]["threshold"] for each in scaled["triggers"]]
    assert [int(text[:-1]) / 1000 for text in targets.values()] == list(map(float, thresholds))
    assert scaled["minReplicaCount"] == spec["minReplicas"]
    assert scaled["maxReplicaCount"] == spec["maxReplicas"]
    deployment = of_kind("Deployment", "server")
    assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "an apply would undo the autoscaler"


def test_shape_of_the_scaled_object() -> None:
    """Shape only: KEDA's schema is not in a package."""
    spec = of_kind("ScaledObject")["spec"]
    assert spec.keys() == {
        "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "advanced",
        "triggers",
    }  # fmt: skip
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    hpa = yaml.safe_load(yaml.safe_dump(of_kind("HorizontalPodAutoscaler")))
    hpa["spec"]["behavior"] = behavior
    validate(hpa)
    for trigger in spec["triggers"]:
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "Value")
        assert trigger["metadata"].keys() == {"serverAddress", "threshold", "query"}
        assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_shape_of_the_serving_runtime(tmp_path: Path) -> None:
    """Shape only: KServe's schema is not in a package. Its container is that of a valid Pod."""
    spec = of_kind("ServingRuntime")["spec"]
    assert spec.keys() == {
        "annotations", "supportedModelFormats", "protocolVersions", "multiModel", "containers",
        "volumes",
    }  # fmt: skip
    (served,) = spec["containers"]
    assert served["name"] == "kserve-container", "KServe merges by this name"
    validate(as_pod({"containers": spec["containers"], "volumes": spec["volumes"]}))
    changes = [each.removeprefix("--set=") for each in served["args"] if each.startswith("--set=")]
    image = ROOT / "configs" / "containers" / "iskander.toml"
    config = load_config(image, overrides=tuple(changes), environment={}).config
    assert config.repository.path == "/mnt/models"
    (port,) = served["ports"]
    assert config.addresses == (f"0.0.0.0:{port['containerPort']}",)
    admin = int(config.admin.address.rpartition(":")[2])
    assert served["readinessProbe"]["httpGet"]["port"] == admin
    assert served["livenessProbe"]["httpGet"]["port"] == admin
    model = of_kind("InferenceService")["spec"]["predictor"]
    assert model["model"]["runtime"] == of_kind("ServingRuntime")["metadata"]["name"]
    (known,) = spec["supportedModelFormats"]
    assert known.items() >= model["model"]["modelFormat"].items()
    assert model["terminationGracePeriodSeconds"] >= stop_s(config)


def test_shape_of_the_ray_job() -> None:
    """Shape only: KubeRay's schema is not in a package. Its Pods are valid Pods."""
    spec = of_kind("RayJob")["spec"]
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    client = of_kind("NetworkPolicy")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    for group in groups:
        validate(as_pod(group["template"]["spec"]))
        assert group["template"]["metadata"]["labels"] == client
        (ray,) = group["template"]["spec"]["containers"]
        assert ray["image"].endswith(f":{cluster['rayVersion']}")
    assert spec["entrypoint"] == "python /job/score.py"
    variables = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    script = of_kind("ConfigMap", "ray")["data"]["score.py"]
    assert set(re.findall(r'environ\["(\w+)"\]', script)) == variables.keys()
    service = of_kind("Service")
    port = service["spec"]["ports"][0]["port"]
    assert variables["ISKANDER_ADDRESS"] == f"{service['metadata']['name']}:{port}"


def test_scorer_of_the_ray_job_scores(tmp_path: Path) -> None:
    """The actor's class without Ray."""
    script = types.ModuleType("score")
    exec(of_kind("ConfigMap", "ray")["data"]["score.py"], vars(script))
    served = [{"name": "ids", "path": str(models.row_ids(tmp_path / "ids"))}]
    with gateway_running(tmp_path, served) as gateway:
        scorer = script.Scorer(gateway.address, "ids")
        result = scorer(pa.table({"x": pa.array([1, 2], pa.int64())}))
        scorer.client.close()
    assert result["y"].to_pylist() == [4, 7]


def test_shape_of_the_kubelet_configuration() -> None:
    """Shape only. The reserved memory is the sum that the kubelet requires."""
    kubelet = of_kind("KubeletConfiguration")
    assert kubelet["cpuManagerPolicy"] == "static"
    assert kubelet["topologyManagerPolicy"] == "single-numa-node"
    reserved = sum(size(each["limits"]["memory"]) for each in kubelet["reservedMemory"])
    needed = size(kubelet["kubeReserved"]["memory"])
    assert reserved == needed + size(kubelet["evictionHard"]["memory.available"])


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with container.replayed_image() as image:
        yield image


def replayed(image: Image, folder: str, tmp_path: Path) -> Pod:
    """The Pod of a Deployment, with a model in its claim, after its first init container."""
    models.row_ids(tmp_path / "models" / "ids" / "1")
    name = of_kind("ConfigMap", folder)["metadata"]["name"]
    (tmp_path / "pod").mkdir()
    tmp_path.chmod(0o755)
    sources = {name: {"iskander.toml": file_of(folder)}, "iskander-models": tmp_path / "models"}
    pod = Pod(image, pod_spec(folder), tmp_path / "pod", sources)
    with running(pod.container("folders")) as first:
        assert first.wait() == 0, first.text()
    return pod


def is_passing(replay: Container, command: list[str]) -> bool:
    return replay.run(*command)[0] == 0


@pytest.mark.slow
@NEEDS_ROOT
def test_pod_of_the_deployment_serves(image: Image, tmp_path: Path) -> None:
    """Mounts, user and command of the manifest: ready by each probe, and stopped by SIGTERM."""
    pod = replayed(image, "server", tmp_path)
    served = container_of(pod.spec, "iskander")
    with running(pod.container("iskander")) as each:
        check = ["python", "-IS", "/usr/local/lib/iskander/healthcheck.py"]
        admin = next(p["containerPort"] for p in served["ports"] if p["name"] == "admin")
        probes = [f"http://127.0.0.1:{admin}{served[name]['httpGet']['path']}"
                  for name in ("startupProbe", "livenessProbe")]  # fmt: skip
        probes.append(f"127.0.0.1:{served['readinessProbe']['grpc']['port']}")
        for probe in probes:
            eventually(partial(is_passing, each, [*check, probe]), within_s=90, what=probe)
        assert any((pod.volumes["state"] / "cache").iterdir()), "the cache is used"
        assert each.stop() == 0
    assert "not used" not in each.text()


@pytest.mark.slow
@NEEDS_ROOT
def test_application_uses_the_sidecar(image: Image, tmp_path: Path) -> None:
    """Another user of the same group: the socket, and regions of shared memory. No TCP listens."""
    pod = replayed(image, "sidecar", tmp_path)
    application = container_of(pod.spec, "application")["securityContext"]["runAsUser"]
    group = pod.spec["securityContext"]["runAsGroup"]
    probe = container_of(pod.spec, "iskander")["readinessProbe"]["exec"]["command"]
    with running(pod.container("iskander")) as each:
        eventually(partial(is_passing, each, probe), within_s=90, what="readiness")
        code, text = each.run("python", "-c", SHARED, user=(application, group))
        assert code == 0, text
        assert text == "1199998 1 1\n"
        listening = each.run("cat", "/proc/net/tcp", "/proc/net/tcp6")[1]
        assert " 0A " not in listening, "a TCP port listens"
        code, text = each.run(*probe, user=(application, group + 1))
        assert code == 1 and "Permission denied" in text
        assert each.stop() == 0


@pytest.mark.slow
@NEEDS_ROOT
def test_serving_runtime_serves(image: Image, tmp_path: Path) -> None:
    """KServe's runtime with the model where its storage initializer puts it."""
    models.row_ids(tmp_path / "models" / "ids" / "1")
    (tmp_path / "pod").mkdir()
    tmp_path.chmod(0o755)
    spec = yaml.safe_load(yaml.safe_dump(of_kind("ServingRuntime")["spec"]))
    claim = {"claimName": "models"}
    spec["volumes"].append({"name": "models", "persistentVolumeClaim": claim})
    mount = {"name": "models", "mountPath": "/mnt/models", "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)
    pod = Pod(image, spec, tmp_path / "pod", {"models": tmp_path / "models"})
    with running(pod.container("kserve-container")) as each:
        check = ["python", "-IS", "/usr/local/lib/iskander/healthcheck.py"]
        url = "http://127.0.0.1:50052/readyz"
        eventually(partial(is_passing, each, [*check, url]), within_s=90, what="readiness")
        assert each.run("iskander", "models")[1].splitlines()[1].startswith("ids")
        assert each.stop() == 0
