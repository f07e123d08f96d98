"""What a start says of the kernels, and that it builds none that are there."""

import logging
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_files.catalog import resolve
from executor_svc.assemble import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.kernels_cpu import compile as build
from executor_svc.kernels_cpu.library import load_library
from executor_svc.step_executor import StepExecutor
from tests.unit.kernels_cpu.scene import kernels
from tests.unit.models.checkpoints import make_model, save


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(make_model("llama-head-dim"), tmp_path / "model")


def start(model: Path, **settings: str) -> tuple[StepExecutor, list[str]]:
    """The executor and what its progress told."""
    config = ExecutorConfig(model=str(model), device="cpu", num_blocks=64, **settings)  # type: ignore[arg-type]
    told: list[str] = []

    def say(activity: str, done: int, total: int, detail: str = "") -> None:
        told.append(activity)

    return build_executor(config, resolve(str(model)), 1, say), told


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "CPU kernels" in record.getMessage()]


def test_a_start_takes_what_an_earlier_one_or_the_installation_built(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels()  # skips where there can be none; built now at the latest
    monkeypatch.setattr(build, "build", lambda *args: pytest.fail("a start compiled"))
    load_library.cache_clear()
    with caplog.at_level(logging.INFO):
        _, told = start(model)
    (used, *_) = lines(caplog)
    assert used.startswith("steps run in the CPU kernels, ") and f"(found: {build.find_library()})" in used
    assert not [what for what in told if what.startswith("building")]


def test_a_start_without_a_compiler_says_what_is_missing_and_serves(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "is_x86", lambda: True)
    monkeypatch.setattr(build, "read_cpu_flags", lambda: build.LEVELS[0].needs)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("PATH", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    with caplog.at_level(logging.INFO):
        executor, _ = start(model)
    (said,) = lines(caplog)
    assert said.startswith("steps run in torch, not in the CPU kernels: no C++ compiler is installed (")
    assert executor.info.num_blocks == 64
    with pytest.raises(ConfigError, match=r"weight_dtype int8 needs the CPU kernels: no C\+\+ compiler"):
        start(model, weight_dtype="int8")
