"""Who may load whom. Each module is imported in an interpreter that has loaded none of ours; `sys.modules` tells.

One process per package loads the third-party packages its modules share, then forks for each module: a fresh
interpreter each, without paying for torch a hundred times.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = [
    "numpy",
    "grpc.aio",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "google.rpc.status_pb2",
    "gguf",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.sdk.trace",
    "pydantic",
    "uvloop",
    "yaml",
]
OURS = ("common", "scheduler_svc", "executor_svc", "deploy", "bench", "stepwire_client")

SCRIPT = """
import importlib, json, os, sys, traceback
ours, preload, modules = json.loads(sys.argv[1])
for name in preload:
    importlib.import_module(name)
assert not [m for m in sys.modules if m.split(".")[0] in ours]
report = {}
for name in modules:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            importlib.import_module(name)
            answer = sorted(sys.modules)
        except BaseException:
            answer = traceback.format_exc()
        with os.fdopen(writer, "w") as out:
            json.dump(answer, out)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as source:
        report[name] = json.load(source)
    os.waitpid(child, 0)
print(json.dumps(report))
"""


def modules_of(package: str) -> list[str]:
    names = []
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def loaded(package: str, preload: list[str]) -> dict[str, list[str]]:
    """For each module of `package`, what its import loaded (the preloaded included)."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / p) for p in (".", "protos", "client"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, json.dumps([OURS, preload, modules_of(package)])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, list[str] | str] = json.loads(done.stdout)
    result = {}
    for name, answer in report.items():
        assert isinstance(answer, list), f"{name} does not import on its own:\n{answer}"
        result[name] = answer
    return result


# Package: what its modules share, and what none of them may load.
RULES: dict[str, tuple[list[str], set[str]]] = {
    "scheduler_svc": (
        [*SHARED, "opentelemetry.instrumentation.grpc", "tokenizers", "jinja2", "smg_grpc_proto"],
        {"torch", "executor_svc", "deploy", "bench"},
    ),
    "executor_svc": ([*SHARED, "torch", "safetensors.torch"], {"scheduler_svc", "deploy", "bench"}),
    "scheduler_svc.core": (["json", "hashlib"], {"asyncio", "grpc", "common.clock", "torch", "executor_svc"}),
    "common": (SHARED, {"torch", "scheduler_svc", "executor_svc", "deploy"}),
}


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, Future[dict[str, list[str]]]]]:
    """`loaded` of each package, two at once."""
    with ThreadPoolExecutor(2) as pool:
        yield {package: pool.submit(loaded, package, preload) for package, (preload, _) in RULES.items()}


@pytest.mark.parametrize("package", RULES)
def test_modules_load_only_what_they_may(package: str, reports: dict[str, Future[dict[str, list[str]]]]) -> None:
    wrong, forbidden = {}, RULES[package][1]
    for name, modules in reports[package].result().items():
        bad = {m for m in modules if any(m == f or m.startswith(f + ".") for f in forbidden)}
        if bad:
            wrong[name] = sorted(bad)[:5]
    assert not wrong


def test_the_seam_to_the_device_knows_no_grpc() -> None:
    assert "grpc" not in loaded_by("executor_svc.step_executor")


def test_starting_the_executor_does_not_load_torch_before_the_port_is_bound() -> None:
    assert "torch" not in loaded_by("executor_svc.app", "executor_svc.__main__", "executor_svc.environment")


def loaded_by(*names: str) -> set[str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / p) for p in (".", "protos", "client"))
    code = f"import sys, json\nfor n in {names!r}: __import__(n)\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout))
