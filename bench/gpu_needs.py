"""What bench.gpu needs of the machine, looked at before anything is started. Loads nothing that may be missing."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parent.parent
# Of what an installation asks for: what only tracing with a collector, the metrics' endpoint, the command line and the
# gateway load.
NOT_LOADED: Final = frozenset(
    {
        "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-instrumentation-grpc",
        "prometheus-client", "typer", "rich", "smg-grpc-proto", "stepwire-client",
    }
)  # fmt: skip
# What the processes of a run load.
LOADED: Final = (
    "scheduler_svc.assemble", "scheduler_svc.workers.process", "executor_svc.app", "executor_svc.assemble",
    "bench.gpu_client", "bench.gpu_executor", "bench.gpu_serve", "bench.gpu_model", "transformers",
)  # fmt: skip
# Beyond it: the reference of the part "model", and what comes with packages named above.
MORE: Final = ("transformers>=5.0", "opentelemetry-api>=1.40", "packaging")


def requirements() -> list[Requirement]:
    """Of both services and this benchmark, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = map(Requirement, (*project["dependencies"], *extras["scheduler"], *extras["executor"], *MORE))
    return [requirement for requirement in wanted if requirement.name not in NOT_LOADED]


def missing() -> list[str]:
    """One line for each package that is not there or too old; theirs included, as far as they are there."""
    found: list[str] = []
    checked: set[str] = set()
    waiting = requirements()
    while waiting:
        wanted = waiting.pop(0)
        if wanted.name.lower() in checked:
            continue
        checked.add(wanted.name.lower())
        try:
            installed = version(wanted.name)
        except PackageNotFoundError:
            found.append(f"{wanted} is not installed")
            continue
        if not wanted.specifier.contains(installed, prereleases=True):
            found.append(f"{wanted} is wanted, {installed} is installed")
        # torch and transformers look after their own, which are many.
        if wanted.name not in ("torch", "transformers"):
            waiting += _theirs(wanted.name)
    return found


def _theirs(name: str) -> Iterator[Requirement]:
    for text in requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def broken() -> str:
    """Why the services' code can not be loaded, the last line of it; empty: it can. Takes as long as loading torch."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import {', '.join(LOADED)}"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
