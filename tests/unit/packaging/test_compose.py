"""What docker-compose.yml and the images promise, read from the files. deploy/verify-compose checks it on an engine."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.requirements import ROOT

DOCKERFILES = sorted((ROOT / "deploy").rglob("*Dockerfile"))
SERVICES = ("model", "executor", "scheduler", "jaeger")


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return content


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = load("docker-compose.yml")["services"]
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"][0].startswith("/tmp:")


def test_each_service_waits_for_what_it_needs_and_none_for_jaeger(services: dict[str, Any]) -> None:
    waits = {name: service.get("depends_on", {}) for name, service in services.items()}
    ended, healthy = {"condition": "service_completed_successfully"}, {"condition": "service_healthy"}
    assert waits == {
        "model": {},
        "executor": {"model": ended},
        "scheduler": {"model": ended, "executor": healthy},
        "jaeger": {},
    }


def test_only_loopback_is_published(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 2
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_only_the_model_service_writes_the_volume(services: dict[str, Any]) -> None:
    mounts = {
        name: [v for v in service["volumes"] if isinstance(v, str) and v.startswith("models:")]
        for name, service in services.items()
    }
    assert mounts["model"] == ["models:/models"]
    assert mounts["executor"] == mounts["scheduler"] == ["models:/models:ro"]


@pytest.mark.parametrize("name", ["executor", "scheduler"])
def test_the_grace_period_is_above_the_drain(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert int(service["stop_grace_period"].removesuffix("s")) >= int(service["environment"]["STEPWIRE_DRAIN_S"]) + 10
    assert service["restart"] == "unless-stopped"
    assert service["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://jaeger:4317"


def test_the_gpu_file_changes_the_executor_alone() -> None:
    services = load("deploy/compose.gpu.yml")["services"]
    assert list(services) == ["executor"]
    (device,) = services["executor"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_jaeger_listens_where_compose_expects_it(services: dict[str, Any]) -> None:
    jaeger = load("deploy/jaeger.yaml")
    assert jaeger["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    assert jaeger["extensions"]["healthcheckv2"]["http"]["endpoint"] == "0.0.0.0:13133"
    assert "http://127.0.0.1:13133/status" in services["jaeger"]["healthcheck"]["test"]
    assert jaeger["extensions"]["jaeger_query"]["http"]["endpoint"] == "0.0.0.0:16686"
    pipeline = jaeger["service"]["pipelines"]["traces"]
    assert set(pipeline["exporters"]) == set(jaeger["exporters"])
    assert set(jaeger["service"]["extensions"]) == set(jaeger["extensions"])


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dockerfiles_name_no_frontend_and_no_host_but_pytorchs(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert "syntax=" not in text
    assert all(url.startswith("download.pytorch.org") for url in text.split("https://")[1:])


@pytest.mark.parametrize("name", ["scheduler", "executor"])
def test_images_run_as_the_user_compose_names(name: str) -> None:
    lines = (ROOT / "deploy" / f"{name}.Dockerfile").read_text().splitlines()
    assert "USER 10001:10001" in lines
    assert lines[-1] == f'ENTRYPOINT ["python", "-P", "-m", "{name}_svc"]'
    assert any(line.startswith("HEALTHCHECK") for line in lines)
