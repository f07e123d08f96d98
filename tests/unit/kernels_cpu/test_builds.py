"""What a real compiler makes of the kernels: it loads, and no sanitiser finds anything in it."""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_svc.environment import read_cpu_flags
from executor_svc.kernels_cpu import compile as build
from executor_svc.kernels_cpu.compile import FLAGS, LEVELS, SOURCE, DamagedKernels, NoKernels, find_compiler
from executor_svc.kernels_cpu.library import Library

# Some of a minute each, where nothing else runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
TILES, VECTORS, AVX2 = LEVELS


@dataclass(frozen=True)
class Builds:
    """What the real compiler makes of the kernels, two at once: under way from the first test that wants one."""

    levels: dict[build.Level, Future[Path]]
    sanitised: dict[tuple[str, build.Level], Future["subprocess.CompletedProcess[str]"]]


# With tiles in plain memory the two upper levels are one.
SANITISED = [(sanitizer, level) for level in (VECTORS, AVX2) for sanitizer in ("address,undefined", "thread")]


def runs(level: build.Level) -> bool:
    return build.is_x86() and read_cpu_flags() >= level.needs


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    if not build.is_x86():
        pytest.skip("for x86-64 processors")
    try:
        compiler = find_compiler()
    except NoKernels as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("builds")

    def build_level(level: build.Level) -> Path:
        path = folder / level.file_name()
        build.build(compiler, level, path)
        return path

    def build_sanitised(sanitizer: str, level: build.Level) -> "subprocess.CompletedProcess[str]":
        flags = [flag for flag in FLAGS if flag not in ("-shared", "-O3")]
        # Names and lines are all a report needs; full debug information takes as long as the rest of the compilation.
        command = [compiler, *flags, *level.options, "-Og", "-g1", f"-fsanitize={sanitizer}",
                   "-fno-sanitize-recover=all", "-DSTEPWIRE_PORTABLE_TILES", f"-I{SOURCE}", str(HERE / "sanitised.cpp"),
                   "-o", str(folder / f"{sanitizer}-{level.name}")]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=False)

    pool = ThreadPoolExecutor(2)
    try:
        yield Builds(
            levels={level: pool.submit(build_level, level) for level in LEVELS},
            sanitised={case: pool.submit(build_sanitised, *case) for case in SANITISED if runs(case[1])},
        )
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: str(level.name))
def test_every_level_compiles_and_loads_where_it_may(builds: Builds, level: build.Level) -> None:
    path = builds.levels[level].result()
    if not runs(level):
        return
    names = {TILES: "AVX-512 and tile registers", VECTORS: "AVX-512", AVX2: "AVX2"}
    try:
        assert Library(path).instructions == names[level]
    except DamagedKernels:
        raise
    except NoKernels as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", SANITISED, ids=lambda case: f"{case[0]} {case[1].name}")
def test_sanitised(builds: Builds, case: tuple[str, build.Level]) -> None:
    """Every kernel on small shapes, tiles in plain memory, where a sanitiser sees each access."""
    if case not in builds.sanitised:
        pytest.skip("the processor can not run these kernels")
    built = builds.sanitised[case].result()
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitiser library")
    assert built.returncode == 0, built.stderr
    program = built.args[-1]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
