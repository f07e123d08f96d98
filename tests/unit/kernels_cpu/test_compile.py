"""Building the kernels: what is missing is said, nothing half-built is ever loaded."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from executor_svc.environment import read_cpu_flags
from executor_svc.kernels_cpu import compile as build
from executor_svc.kernels_cpu.compile import FLAGS, SOURCE, NoKernels, check_able, find_compiler, kernel_library
from executor_svc.kernels_cpu.library import Library

HERE = Path(__file__).parent


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A processor that has everything and an empty cache."""
    monkeypatch.setattr(build, "read_cpu_flags", lambda: build.NEEDED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_processor_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "read_cpu_flags", lambda: build.NEEDED - {"avx512_bf16"})
    for ask in (check_able, kernel_library):
        with pytest.raises(NoKernels, match="lacks avx512_bf16"):
            ask()


def test_no_compiler(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(able))
    monkeypatch.delenv("CXX", raising=False)
    for ask in (check_able, kernel_library):
        with pytest.raises(NoKernels, match="no C\\+\\+ compiler"):
            ask()


def test_a_compiler_that_fails_leaves_nothing(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = able / "broken"
    script.write_text("#!/bin/sh\necho 'step.cpp:1: error: no' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(NoKernels, match=r"step\.cpp:1: error: no"):
        kernel_library()
    assert not list(able.rglob("*.so"))


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "step.so"
    path.write_bytes(b"not a library")
    with pytest.raises(NoKernels, match="can not be loaded"):
        Library(path)


def test_a_read_only_cache(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    monkeypatch.setenv("HOME", "/proc")
    (able / "stepwire").write_text("a file where the cache should be")
    with pytest.raises(NoKernels, match="cache"):
        kernel_library()


def test_home_stands_in_for_a_cache_that_can_not_be_written(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = able / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho >"$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HOME", str(able / "home"))
    (able / "stepwire").write_text("a file where the cache should be")
    built = kernel_library()
    assert built.parent == able / "home" / ".cache" / "stepwire" / "kernels"
    compiler.unlink()
    assert kernel_library() == built
    assert [path for path in built.parent.iterdir() if path.name != "lock"] == [built]


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitised(tmp_path: Path, sanitizer: str) -> None:
    """Every kernel on small shapes, tiles in plain memory, where a sanitiser sees each access."""
    if not read_cpu_flags() >= build.NEEDED:
        pytest.skip("needs the kernels' instructions")
    try:
        compiler = find_compiler()
    except NoKernels as error:
        pytest.skip(str(error))
    program = tmp_path / "sanitised"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-O3")]
    command = [compiler, *flags, "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all",
               "-DSTEPWIRE_PORTABLE_TILES", f"-I{SOURCE}", str(HERE / "sanitised.cpp"), "-o", str(program)]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitiser library")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
