"""What bench.gpu asks for is what a run loads, no more and no less."""

import subprocess
import sys
from importlib.metadata import packages_distributions
from importlib.util import find_spec

import pytest

import bench.gpu_needs
from bench.gpu_needs import LOADED, NOT_LOADED, broken, missing, requirements

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("packaging") is None, reason="bench.gpu itself needs packaging"),
]


# transformers loads far more, and looks after it.
OURS = [module for module in LOADED if module != "transformers"]


def loaded_modules() -> set[str]:
    code = f"import sys, {', '.join(OURS)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_nothing_is_missing_or_broken_here() -> None:
    assert missing() == []
    assert broken() == ""


def test_what_is_left_out_is_not_loaded_and_what_is_asked_for_is() -> None:
    modules = loaded_modules()
    owners = packages_distributions()
    # Namespaces of many packages say nothing of which one it was.
    tops = {name.partition(".")[0] for name in modules} - {"opentelemetry", "google"}
    loaded = {owner.lower().replace("_", "-") for top in tops for owner in owners.get(top, ())}
    assert not loaded & (NOT_LOADED - {"stepwire-client"})  # which the checkout holds
    asked = {requirement.name.lower() for requirement in requirements()}
    by_a_call = {
        "protobuf",
        "grpcio-status",
        "googleapis-common-protos",
        "opentelemetry-api",
        "packaging",
        "transformers",
    }
    assert asked - loaded <= by_a_call
    assert "opentelemetry.trace" in modules
    assert not any(name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")) for name in modules)


def test_what_is_broken_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.gpu_needs, "LOADED", ("a_module_that_is_not_there",))
    assert "a_module_that_is_not_there" in broken()
