"""What docker-compose.yml and the images promise, read from the files. deploy/verify-compose checks it on an engine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.requirements import ROOT
from deploy.verify_compose import is_as_built
from executor_svc.kernels_cpu.compile import LEVELS, PREBUILT, is_x86

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


class ModelService:
    """The model service's script, with directories of this machine for those of its container."""

    def __init__(self, script: str, at: Path) -> None:
        self.given, self.volume = at / "given", at / "models"
        self.volume.mkdir()
        script = re.sub(r"(?<![\w/.])/(?=given)", f"{at}/", script.replace("$$", "$"))
        self._script = script.replace("/models/", f"{self.volume}/")
        (at / "stepwire").write_text('#!/bin/sh\necho "stepwire $*"\n')
        (at / "stepwire").chmod(0o755)
        self._path = f"{at}:{os.environ['PATH']}"

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": self._path, "MODEL": "", "MODEL_FILE": ""} | environment
        return subprocess.run(["sh", "-euc", self._script], env=variables, capture_output=True, text=True, timeout=60)


@pytest.fixture
def model_service(services: dict[str, Any], tmp_path: Path) -> ModelService:
    (script,) = services["model"]["command"]
    return ModelService(script, tmp_path)


def test_the_model_is_pulled_or_copied_but_not_both(model_service: ModelService) -> None:
    assert model_service.run().stdout == "stepwire models pull\n"
    assert model_service.run(MODEL="o/n").stdout == "stepwire models pull o/n\n"
    model_service.given.write_text("a file")
    for _ in range(2):
        assert model_service.run(MODEL_FILE="m").returncode == 0
        assert (model_service.volume / "given").read_text() == "a file"
    both = model_service.run(MODEL_FILE="m", MODEL="o/n")
    assert both.returncode == 2 and "both set" in both.stderr


@pytest.mark.parametrize("has_ref", [True, False])
def test_a_hugging_face_cache_is_copied_by_what_its_links_lead_to(model_service: ModelService, has_ref: bool) -> None:
    snapshot = model_service.given / "snapshots" / "abc"
    blobs = model_service.given / "blobs"
    for folder in (snapshot, blobs, model_service.given / "refs"):
        folder.mkdir(parents=True)
    if has_ref:
        (model_service.given / "snapshots" / "aaa").mkdir()
        (model_service.given / "refs" / "main").write_text("abc")
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert model_service.run(MODEL_FILE="m").returncode == 0
    copied = model_service.volume / "given" / "config.json"
    assert copied.read_text() == "{}" and not copied.is_symlink()


def test_a_snapshot_alone_is_refused_with_what_to_give_instead(model_service: ModelService) -> None:
    model_service.given.mkdir()
    (model_service.given / "config.json").symlink_to("../../blobs/1")
    done = model_service.run(MODEL_FILE="m")
    assert done.returncode == 2 and "models--OWNER--NAME" in done.stderr and not any(model_service.volume.iterdir())


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


def test_the_gpu_file_gives_the_executor_an_image_and_a_device_and_takes_nothing_away() -> None:
    executor = load("deploy/compose.gpu.yml")["services"]["executor"]
    assert set(executor) == {"image", "build", "environment", "mem_limit", "deploy"}  # no tmpfs, no user, no ports
    assert executor["environment"] == {"STEPWIRE_DEVICE": "cuda", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    assert executor["build"]["args"] == {"TORCH_INDEX": "${TORCH_INDEX:-}", "TORCH_WHEELS": "deploy/wheels/cuda"}
    assert executor["image"] == "stepwire-executor-cuda" and executor["mem_limit"] == "${EXECUTOR_MEMORY:-0}"


def test_scripts_and_images_ask_for_one_release_of_torch() -> None:
    image, script = (ROOT / "deploy" / name for name in ("executor.Dockerfile", "dev"))
    (asked,) = re.findall(r"^ARG TORCH_VERSION=(\S+)$", image.read_text(), re.MULTILINE)
    assert f"torch_version=${{TORCH_VERSION:-{asked}}}\n" in script.read_text()


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


def test_the_build_context_holds_every_package() -> None:
    """Images install the whole project: a package that .dockerignore keeps out fails their build."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for package in setuptools["packages"]:
        top, *rest = package.split(".")
        file = Path(setuptools["package-dir"].get(top, top), *rest, "__init__.py")
        assert let_in & {str(file), *map(str, file.parents)}, package


def test_kernels_built_in_the_executors_container_can_be_loaded(services: dict[str, Any]) -> None:
    """Engines mount a tmpfs noexec unless told otherwise, and libraries can not be loaded from there."""
    (home,) = [mount for mount in services["executor"]["tmpfs"] if mount.startswith("/home/stepwire:")]
    assert "exec" in home.partition(":")[2].split(",")
    image = (ROOT / "deploy" / "executor.Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert "ARG COMPILER=g++\n" in image and image.index("$COMPILER") < image.index("USER ")


def test_the_executors_image_brings_the_cpu_kernels(tmp_path: Path) -> None:
    """Its stage `kernels`, by hand: only what is copied there, Python's own library, and a compiler that only tells."""
    text = (ROOT / "deploy" / "executor.Dockerfile").read_text()
    stage = text.partition(" AS kernels\n")[2].partition("\nFROM ")[0]
    copied = re.findall(r"^COPY (.+) (\S+)$", stage, re.MULTILINE)
    for names, target in copied:
        for name in names.split():
            assert (ROOT / name).exists()
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tmp_path / target)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$*" >"$last"\n')
    compiler.chmod(0o755)
    (module, target), *_ = re.findall(r"python -m (\S+) (\S+);", stage)
    command = [sys.executable, "-S", "-E", "-m", module, str(tmp_path / target[1:])]
    done = subprocess.run(
        command, cwd=tmp_path, env={"CXX": str(compiler)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    built = {path.name for path in (tmp_path / target[1:]).iterdir()}
    assert built == ({level.file_name() for level in LEVELS} if is_x86() else set())

    (place,) = re.findall(rf"^COPY --from=kernels {target} (\S+)$", text, re.MULTILINE)
    assert place == f"/opt/stepwire/lib/python3.11/site-packages/{PREBUILT.relative_to(ROOT)}"


@pytest.mark.parametrize("name", ["scheduler", "executor"])
def test_images_run_as_the_user_compose_names(name: str) -> None:
    lines = (ROOT / "deploy" / f"{name}.Dockerfile").read_text().splitlines()
    assert "USER 10001:10001" in lines
    assert lines[-1] == f'ENTRYPOINT ["python", "-P", "-m", "{name}_svc"]'
    assert any(line.startswith("HEALTHCHECK") for line in lines)


@pytest.mark.parametrize(
    ("compiler", "said", "fits"),
    [
        (None, "CPU kernels for AVX-512: /opt/executor_svc/kernels_cpu/prebuilt/step-vectors-0.so\nno compiler", True),
        (None, "no CPU kernels: slower: the processor lacks fma\nno compiler", True),
        ("clang", "no CPU kernels: slower: they are for x86-64 processors, not for aarch64\nno compiler", True),
        ("", "no CPU kernels: slower: they are for x86-64 processors, not for aarch64\nno compiler", True),
        ("", "no CPU kernels: slower: no C++ compiler is installed (Debian's package g++)\nno compiler", True),
        (None, "no CPU kernels: slower: no C++ compiler is installed (Debian's package g++)\nno compiler", False),
        ("", "CPU kernels for AVX-512: /opt/executor_svc/kernels_cpu/prebuilt/step-vectors-0.so\nno compiler", False),
        (None, "CPU kernels for AVX-512: /models/stepwire/kernels/step-vectors-0.so\nno compiler", False),
        (None, "CPU kernels for AVX-512: /opt/kernels_cpu/prebuilt/step-vectors-0.so\n/usr/bin/g++", False),
    ],
)
def test_an_images_kernels_are_judged_by_how_it_was_built(compiler: str | None, said: str, fits: bool) -> None:
    assert is_as_built(said, compiler) is fits
