"""The files under ``deploy/`` keep to their schemas, to each other and to the server. All offline."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from compose_spec import PyCompose

from twostroke.cli import serve_verb
from twostroke.core.version import __version__
from twostroke.server.gate import OPEN_ROUTES
from twostroke.server.metrics import Metrics
from twostroke.server.ray_serve.settings import Arguments

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
SPARE_S = 5.0
"""Between the longest that a server takes to end by itself and its being killed."""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def named(kind: str) -> dict[str, Any]:
    (found,) = (each for path in MANIFESTS for each in documents(path) if each["kind"] == kind)
    return found


def walked(node: Any) -> Iterator[dict[str, Any]]:
    """Every table in ``node``."""
    if isinstance(node, dict):
        yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from walked(each)


def options(words: list[str]) -> dict[str, str]:
    """Of a ``serve`` command line, all of which the command has."""
    verb, model, *rest = words
    assert verb == "serve"
    assert model == "/model"
    known = {name for each in typer.main.get_command(serve_verb.app).params for name in each.opts}
    found = dict(zip(rest[::2], rest[1::2], strict=True))
    assert found.keys() <= known
    return found


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def compose_text() -> str:
    """The file, its variables replaced as Compose does before it reads it."""
    text = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    return re.sub(r"\$\{(\w+):\?[^}]+\}", r"./\1", text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    PyCompose.from_yaml(compose_text())  # raises for what the Compose specification does not know
    found: dict[str, Any] = yaml.safe_load(compose_text())
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_keep_to_kubernetes_schemas(path: Path) -> None:
    for document in documents(path):
        if document["kind"] == "RayService":  # another schema's; its pods are Kubernetes'
            groups = [
                document["spec"]["rayClusterConfig"]["headGroupSpec"],
                *document["spec"]["rayClusterConfig"]["workerGroupSpecs"],
            ]
            document = {
                "apiVersion": "v1",
                "kind": "PodTemplateList",
                "items": [
                    {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": f"g{i}"}, "template": group["template"]}
                    for i, group in enumerate(groups)
                ],
            }
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_mistake_in_a_manifest_is_found() -> None:
    document = named("Deployment")
    document["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_mistake_in_the_compose_file_is_found() -> None:
    with pytest.raises(ValueError, match="restrat"):
        PyCompose.from_yaml(compose_text().replace("restart:", "restrat:"))


def test_a_pod_ends_by_itself_before_it_is_killed() -> None:
    pod = named("Deployment")["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    found = options(server["args"])
    before_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before_s + float(found["--grace-s"]) + SPARE_S


def test_probes_ask_routes_that_need_no_key() -> None:
    (server,) = named("Deployment")["spec"]["template"]["spec"]["containers"]
    paths = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert set(paths.values()) <= OPEN_ROUTES


def test_names_of_one_manifest_are_those_of_the_others() -> None:
    deployment, service, scaler = named("Deployment"), named("Service"), named("HorizontalPodAutoscaler")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert named("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    ports = {port["name"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    claims = {each["claimName"] for path in MANIFESTS for each in walked(documents(path)) if "claimName" in each}
    assert claims == {named("PersistentVolumeClaim")["metadata"]["name"]}
    images = {each["image"] for path in MANIFESTS for each in walked(documents(path)) if "image" in each}
    assert {image.rpartition(":")[2] for image in images} == {__version__}


def test_mounts_are_of_volumes_that_exist_and_the_server_needs_no_rights() -> None:
    pods = [each for path in MANIFESTS for each in walked(documents(path)) if "containers" in each]
    assert len(pods) == 3
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}


def test_the_autoscaler_asks_for_metrics_that_a_server_has() -> None:
    exist = {line.split(" ")[0] for line in Metrics().render({}).decode().splitlines() if not line.startswith("#")}
    asked = {each["pods"]["metric"]["name"] for each in named("HorizontalPodAutoscaler")["spec"]["metrics"]}
    assert asked <= exist


def test_the_ray_services_arguments_are_those_that_the_application_takes(tmp_path: Path) -> None:
    spec = named("RayService")["spec"]
    config = yaml.safe_load(spec["serveConfigV2"])
    (application,) = config["applications"]
    module, _, name = application["import_path"].partition(":")
    source = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"\ndef {name}(" in source
    (tmp_path / "config.json").write_text("{}")
    arguments = Arguments.read(application["args"] | {"model": str(tmp_path)})
    settings, scale = arguments.settings()
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    node_cpus = int(workers["rayStartParams"]["num-cpus"])
    assert node_cpus == int(container["resources"]["limits"]["cpu"]) == scale.replica_cpus
    assert workers["maxReplicas"] * node_cpus >= scale.max_replicas * scale.replica_cpus
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] >= settings.grace_s + SPARE_S
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert application["args"]["model"] in mounts
    assert str(Path(application["args"]["api_key_file"]).parent) in mounts
    locked = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    assert cluster["rayVersion"] == locked["ray"]


def test_the_ray_service_keeps_to_serves_schema() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray Serve (the extra ray) is not installed")
    schema.ServeDeploySchema.model_validate(yaml.safe_load(named("RayService")["spec"]["serveConfigV2"]))


def test_the_compose_server_ends_by_itself_and_others_read_its_metrics_with_a_key(compose: dict[str, Any]) -> None:
    server = compose["services"]["server"]
    found = options(server["command"])
    assert seconds(server["stop_grace_period"]) >= float(found["--grace-s"]) + SPARE_S
    assert found["--api-key-file"] == "/run/secrets/" + server["secrets"][0]
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert job["authorization"] == {"credentials_file": f"/run/secrets/{secret}"}
    assert job["static_configs"] == [{"targets": [f"server:{found['--port']}"]}]
    published = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_every_file_that_the_compose_file_mounts_is_there(compose: dict[str, Any]) -> None:
    binds = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
        if isinstance(volume, str) and volume.startswith(".")
    ]
    assert len(binds) == 3
    assert all((DEPLOY / bind).exists() for bind in binds)
    volumes = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
        if isinstance(volume, str) and not volume.startswith(".")
    }
    assert volumes == compose["volumes"].keys()
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/twostroke.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/twostroke.yaml").read_text())["providers"]
    targets = {volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]}
    assert f"{provider['options']['path']}/twostroke.json" in targets


def test_the_images_are_built_as_the_files_say() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "ARG EXTRAS=" in text
    assert "EXTRAS=ray" in (DEPLOY / "kubernetes" / "rayservice.yaml").read_text()
    assert shlex.split(text.split("ENTRYPOINT ")[1].splitlines()[0].strip("[]"))[0] == "twostroke"
