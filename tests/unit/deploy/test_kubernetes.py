"""The manifests: built by kubectl itself, held against Kubernetes' schemas, and against what the code really does."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from laminar.pipeline.config.loading import load_config
from laminar.pipeline.config.models import RunConfig
from laminar.pipeline.config.source import ENV_PREFIX
from laminar.pipeline.lag import consumptions
from laminar.pipeline.monitor import PATHS
from laminar.streams.open import KafkaLogConfig
from laminar.streams.topics import topic_specs

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
ROOTS = {"base": KUBERNETES / "base", "example": KUBERNETES / "overlays" / "example"}
SCHEMAS = "1.33"
"""Of the Kubernetes version whose schemas are used; native sidecars are stable from it on."""

Manifest = dict[str, Any]


@functools.cache
def built(root: str) -> list[Manifest]:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or "kubectl"
    done = subprocess.run(
        [kubectl, "kustomize", str(ROOTS[root])], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def of_kind(root: str, kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in built(root) if one["kind"] == kind}


def pod_specs(root: str) -> dict[str, Manifest]:
    return {name: one["spec"]["template"]["spec"] for name, one in of_kind(root, "StatefulSet").items()}


def containers(root: str) -> Iterator[tuple[str, Manifest, Manifest]]:
    """(StatefulSet, pod, container), sidecars too."""
    for name, pod in pod_specs(root).items():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield name, pod, container


def run_config(root: str) -> RunConfig:
    return load_config(ROOTS[root] / "run.yaml", environ={}, check_files=False).config


both = pytest.mark.parametrize("root", ROOTS)


@both
def test_every_manifest_is_valid_by_kubernetes_own_schemas(root: str) -> None:
    kinds = {one["kind"] for one in built(root)}
    wanted = {"StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount"}
    assert wanted <= kinds
    for manifest in built(root):
        kubernetes_validate.validate(manifest, SCHEMAS, strict=True)


def test_the_validator_sees_a_misspelt_field() -> None:
    broken = yaml.safe_load(yaml.safe_dump(of_kind("base", "StatefulSet")["laminar-reward"]))
    pod = broken["spec"]["template"]["spec"]
    pod["containers"][0]["readinesProbe"] = pod["containers"][0].pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, SCHEMAS, strict=True)


@both
def test_the_run_file_in_the_config_map_is_valid_and_is_what_the_pods_mount(root: str) -> None:
    maps = {name: one for name, one in of_kind(root, "ConfigMap").items() if name.startswith("laminar-run-")}
    ((name, config_map),) = maps.items()
    assert config_map["data"]["run.yaml"] == (ROOTS[root] / "run.yaml").read_text()
    config = run_config(root)
    assert isinstance(config.log, KafkaLogConfig)
    for _, pod, container in containers(root):
        mounted = {volume["name"] for volume in pod["volumes"] if volume.get("configMap", {}).get("name") == name}
        (mount,) = [one for one in container["volumeMounts"] if one["name"] in mounted]
        assert container["args"][2] == f"{mount['mountPath']}/run.yaml"


@both
def test_every_operator_of_the_run_file_has_pods_and_each_is_started_as_the_command_wants(root: str) -> None:
    config = run_config(root)
    found = set()
    for _, _, container in containers(root):
        command, operator, _, *options = container["args"]
        assert command == "operator"
        assert options[::2] == ["--instance", "--port"]
        assert options[1] in ("$(POD_INDEX)", "0")
        found.add(operator)
    assert found == set(config.operators)


@both
def test_a_pod_knows_its_replica_by_its_ordinal_and_its_sidecar_advertises_the_pods_address(root: str) -> None:
    for _, _, container in containers(root):
        env = {one["name"]: one for one in container["env"]}
        where = env["POD_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert where == "metadata.labels['apps.kubernetes.io/pod-index']"
        operator = container["args"][1]
        if "relay" in operator:
            name = f"{ENV_PREFIX}OPERATORS__{operator.upper()}__ADVERTISE"
            assert env[name]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@both
def test_settings_in_the_environment_are_settings_that_exist(root: str) -> None:
    for _, _, container in containers(root):
        given = {one["name"]: one.get("value", "10.0.0.1") for one in container["env"]}
        ours = {name: value for name, value in given.items() if name.startswith(ENV_PREFIX)}
        load_config(ROOTS[root] / "run.yaml", environ=ours, check_files=False)


@both
def test_probes_ask_what_the_process_serves_on_the_port_it_is_told_to_listen_on(root: str) -> None:
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert set(paths.values()) <= set(PATHS)
    for _, _, container in containers(root):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        told = int(container["args"][container["args"].index("--port") + 1])
        for probe, path in paths.items():
            get = container[probe]["httpGet"]
            assert get["path"] == path
            assert ports[get["port"]] == told
        assert container["livenessProbe"]["periodSeconds"] * container["livenessProbe"]["failureThreshold"] <= 120


@both
def test_scrape_annotations_and_service_name_the_same_port(root: str) -> None:
    port = run_config(root).monitor.port
    assert run_config(root).monitor.host == "0.0.0.0"
    (service,) = of_kind(root, "Service").values()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["port"] == port
    for one in of_kind(root, "StatefulSet").values():
        assert one["spec"]["serviceName"] == service["metadata"]["name"]
        annotations = one["spec"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(port)
        assert annotations["prometheus.io/path"] in PATHS
        main = one["spec"]["template"]["spec"]["containers"][0]
        assert main["args"][-2:] == ["--port", str(port)]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


@both
def test_pods_have_longer_than_the_drain_deadline_to_end(root: str) -> None:
    drain_s = run_config(root).runner.drain_timeout_s
    for name, pod in pod_specs(root).items():
        assert pod["terminationGracePeriodSeconds"] >= drain_s + 30, name


@both
def test_pods_pass_the_restricted_pod_security_standard(root: str) -> None:
    for name, pod, container in containers(root):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])
        assert pod["automountServiceAccountToken"] is False
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not own.get("privileged")


@both
def test_every_container_asks_for_cpu_and_memory_and_is_limited_in_memory(root: str) -> None:
    for name, _, container in containers(root):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), name
        assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_rollout_and_trainer_have_a_gpu_but_not_in_the_example() -> None:
    for root, expected in (("base", {"laminar-rollout", "laminar-trainer"}), ("example", set())):
        found = {name for name, _, one in containers(root) if "nvidia.com/gpu" in one["resources"].get("limits", {})}
        assert found == expected


@both
def test_pods_that_share_weights_share_memory_with_a_relay_of_their_own(root: str) -> None:
    config = run_config(root)
    for name, pod in pod_specs(root).items():
        kinds = {getattr(config.operators[c["args"][1]], "kind", ""): c for _, p, c in containers(root) if p is pod}
        if {"rollout", "trainer"} & kinds.keys():
            relay = kinds["relay"]
            assert relay["restartPolicy"] == "Always"  # a sidecar: there before the operator, gone after it
            memory = {v["name"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"}
            for container in kinds.values():
                mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
                assert [mounts[one] for one in memory] == ["/dev/shm"], name
            assert config.operators[relay["args"][1]].port == 7070  # type: ignore[attr-defined]


@both
def test_secrets_come_from_secrets_and_stand_in_no_file(root: str) -> None:
    config = run_config(root)
    assert isinstance(config.log, KafkaLogConfig)
    wanted = {value.env for value in config.log.client.values() if hasattr(value, "env")}
    assert wanted == {"KAFKA_USERNAME", "KAFKA_PASSWORD"}
    for name, _, container in containers(root):
        from_secrets = {one["name"] for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})}
        assert wanted <= from_secrets, name
    assert "Secret" not in {one["kind"] for one in built(root)}


@both
def test_no_more_pods_than_partitions_and_one_of_what_must_be_alone(root: str) -> None:
    config = run_config(root)
    partitions = {spec.name: spec.partitions for spec in topic_specs(config.log.partitions)}
    read = {item.operator: partitions[item.topic] for item in consumptions(config) if item.member}
    sets = of_kind(root, "StatefulSet")
    replicas = {name.removeprefix("laminar-"): one["spec"]["replicas"] for name, one in sets.items()}
    assert (replicas["prompts"], replicas["trainer"], replicas["repack"]) == (1, 1, 2)
    assert all(replicas[name] <= read[name] for name in ("rollout", "reward"))


@both
def test_budgets_let_nodes_be_drained_and_match_what_has_more_than_one_pod(root: str) -> None:
    several = {name for name, one in of_kind(root, "StatefulSet").items() if one["spec"]["replicas"] > 1}
    budgets = of_kind(root, "PodDisruptionBudget")
    assert budgets.keys() == several
    for name, budget in budgets.items():
        labels = of_kind(root, "StatefulSet")[name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert budget["spec"]["maxUnavailable"] == 1


def test_the_image_runs_as_the_manifests_user() -> None:
    text = (KUBERNETES.parent / "Dockerfile").read_text()
    user = re.search(r"^USER (\d+):(\d+)$", text, re.MULTILINE)
    assert user is not None
    (context,) = {str(pod["securityContext"]["runAsUser"]) for pod in pod_specs("base").values()}
    assert user[1] == context
    assert 'ENTRYPOINT ["laminar"]' in text
