"""What a start says of the kernels, and that it builds none that are there."""

import logging
import shutil
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_files.catalog import resolve
from executor_svc.assemble import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.kernels_cpu import compile as build
from executor_svc.kernels_cpu import library
from executor_svc.step_executor import StepExecutor
from tests.unit.kernels_cpu.scene import kernels, put_foreign
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


def steps(caplog: pytest.LogCaptureFixture) -> str:
    """What the log says of where steps run, once."""
    (said,) = [line for line in lines(caplog) if line.startswith("steps run in ")]
    return said


def test_a_start_takes_what_an_earlier_one_or_the_installation_built(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels()  # skips where there can be none; built now at the latest
    monkeypatch.setattr(library, "build", lambda *args: pytest.fail("a start compiled"))
    with caplog.at_level(logging.INFO):
        _, told = start(model)
    (used, *_) = lines(caplog)
    assert used.startswith("steps run in the CPU kernels, ") and f"(found: {kernels().path})" in used
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


def test_a_start_that_finds_only_what_does_not_load_says_that_it_builds(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And one that has no compiler either serves in torch."""
    good = kernels().path
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    put_foreign(tmp_path / "stepwire" / "kernels" / good.name)
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
        patched.setattr(build, "_COMPILERS", ())
        patched.delenv("CXX", raising=False)
        _, told = start(model)
    assert "no C++ compiler is installed" in steps(caplog) and "building the CPU kernels" not in told
    caplog.clear()
    monkeypatch.setattr(library, "find_compiler", lambda: "copy")
    monkeypatch.setattr(build, "find_compiler", lambda: "copy")
    monkeypatch.setattr(library, "build", lambda compiler, level, target: shutil.copy(good, target))
    with caplog.at_level(logging.INFO):
        _, told = start(model)
    assert told.count("building the CPU kernels") == 2 and "(just built: " in steps(caplog)


def test_a_user_without_a_home_directory_has_the_images_kernels_or_torch(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = kernels().path
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    with caplog.at_level(logging.INFO):
        start(model)
    assert steps(caplog).startswith("steps run in torch, not in the CPU kernels: there is no home directory")
    shutil.copy(good, tmp_path)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        start(model)
    assert steps(caplog).endswith(f"(found: {tmp_path / good.name})")
