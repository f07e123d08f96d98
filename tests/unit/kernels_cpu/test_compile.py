"""Building the kernels: what is missing is said, what is damaged is built again, nothing half-built is ever loaded."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from executor_svc.environment import read_cpu_flags
from executor_svc.kernels_cpu import compile as build
from executor_svc.kernels_cpu import library
from executor_svc.kernels_cpu.compile import (
    FLAGS,
    LEVELS,
    DamagedKernels,
    NoKernels,
    check_able,
    own_level,
)
from executor_svc.kernels_cpu.library import Library, find_library, load_library
from executor_svc.kernels_cpu.prebuild import prebuild
from tests.unit.kernels_cpu.scene import put_foreign

HERE = Path(__file__).parent
TILES, VECTORS, AVX2 = LEVELS


@dataclass(frozen=True)
class Compiler:
    """A script in a compiler's place: writes one line as the library, and what it was asked into a file.

    What it writes counts as loaded.
    """

    path: Path
    calls: Path

    def num_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@dataclass(frozen=True)
class Loaded:
    """In the library's place; what `put_foreign` put does not load."""

    path: Path

    def __post_init__(self) -> None:
        if b"of another system" in self.path.read_bytes():
            raise DamagedKernels(f"the kernels can not be loaded: {self.path}")


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A processor that has everything and an empty cache."""
    monkeypatch.setattr(build, "is_x86", lambda: True)
    monkeypatch.setattr(build, "read_cpu_flags", lambda: TILES.needs)
    monkeypatch.setattr(build, "gives_tiles", lambda: True)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def compiler(able: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(able / "compiler", able / "calls")
    made.path.write_text(f'#!/bin/sh\necho "$*" >>{made.calls}\nfor last; do :; done\necho "a library" >"$last"\n')
    made.path.chmod(0o755)
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setattr(library, "Library", Loaded)
    return made


def found() -> Path | None:
    loaded = find_library()
    return loaded.path if loaded is not None else None


def libraries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != "lock"]


def test_a_processor_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_x86", lambda: True)
    monkeypatch.setattr(build, "read_cpu_flags", lambda: TILES.needs - {"fma"})
    for ask in (check_able, load_library, find_library):
        with pytest.raises(NoKernels, match=r"lacks fma$"):
            ask()


def test_another_kind_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(NoKernels, match="for x86-64 processors, not for aarch64"):
        own_level()


def test_a_cache_that_comes_to_an_older_processor(
    able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may use an instruction is not even looked for where the processor lacks it."""
    best = load_library().path
    assert own_level() is TILES and best.name.startswith("step-tiles-")
    for lacking in sorted(TILES.needs):
        monkeypatch.setattr(build, "read_cpu_flags", lambda lacking=lacking: TILES.needs - {lacking})
        if lacking in AVX2.needs:
            with pytest.raises(NoKernels, match=f"lacks {lacking}$"):
                find_library()
        else:
            assert own_level() is (AVX2 if lacking in VECTORS.needs else VECTORS) and find_library() is None
    monkeypatch.setattr(build, "read_cpu_flags", lambda: VECTORS.needs)
    older = load_library().path
    assert older.name.startswith("step-vectors-") and compiler.num_calls() == 2
    assert not [call for call in compiler.calls.read_text().splitlines()[1:] if "amx" in call]
    monkeypatch.setattr(build, "read_cpu_flags", lambda: TILES.needs | {"more"})
    assert load_library().path == best and compiler.num_calls() == 2


def test_no_option_stands_for_the_machine_that_builds() -> None:
    for level in LEVELS:
        assert not [option for option in (*FLAGS, *level.options) if "native" in option]


def test_no_compiler(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(able))
    monkeypatch.delenv("CXX", raising=False)
    for ask in (check_able, load_library, find_library):
        with pytest.raises(NoKernels, match=r"no C\+\+ compiler is installed .*g\+\+"):
            ask()


def test_a_compiler_that_fails_leaves_nothing(able: Path, compiler: Compiler) -> None:
    compiler.path.write_text("#!/bin/sh\necho 'step.cpp:1: error: no' >&2\nexit 1\n")
    with pytest.raises(NoKernels, match=r"step\.cpp:1: error: no"):
        load_library()
    assert not list(able.rglob("*.so"))


def test_what_was_built_once_needs_no_compiler(able: Path, compiler: Compiler) -> None:
    assert find_library() is None
    built = load_library().path
    compiler.path.unlink()
    assert found() == built == load_library().path
    assert libraries(built.parent) == [built]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "longer"])
def test_a_damaged_library_is_built_again(able: Path, compiler: Compiler, damage: str) -> None:
    built = load_library().path
    whole = built.read_bytes()
    other = {"cut": whole[:-1], "changed": b"X" + whole[1:], "empty": b"", "longer": whole + b"\n"}[damage]
    built.write_bytes(other)
    assert find_library() is None
    assert load_library().path == built and built.read_bytes() == whole and compiler.num_calls() == 2


def test_a_whole_library_that_does_not_load_is_built_again_once(
    able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = build.cache_folders()[0] / TILES.file_name()
    put_foreign(place)
    assert find_library() is None and f"can not be loaded: {place}" in caplog.text
    for _ in range(2):
        assert load_library().path == place and compiler.num_calls() == 1


def test_where_what_was_built_does_not_load_either_every_cache_is_tried(
    able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "Library", Library)  # the compiler's line is no library
    with pytest.raises(NoKernels, match=r"no cache can hold the kernels: .*can not be loaded.*can not be loaded"):
        load_library()
    assert compiler.num_calls() == 2


def test_executors_that_start_together_build_once(able: Path, compiler: Compiler) -> None:
    """Processes of their own, as executors are; each waits for whoever builds."""
    script = (
        "from executor_svc.kernels_cpu import compile as build, library\n"
        "build.is_x86 = build.gives_tiles = lambda: True\n"
        "build.read_cpu_flags = lambda: build.LEVELS[0].needs\n"
        "library.Library = lambda path: path\n"
        "print(library.load_library())"
    )

    def start(_: int) -> str:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(start, range(4)))
    assert paths == {str(found())} and compiler.num_calls() == 1


def test_an_images_libraries_serve_every_processor_they_can(
    able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cache and no compiler needed."""
    prebuild(build.PREBUILT)
    assert compiler.num_calls() == len(LEVELS)
    for level in LEVELS:
        monkeypatch.setattr(build, "read_cpu_flags", lambda level=level: level.needs)
        assert found() == load_library().path == build.PREBUILT / level.file_name()
    assert compiler.num_calls() == len(LEVELS)


def test_an_images_library_comes_before_the_caches(able: Path, compiler: Compiler) -> None:
    """A cache may have been mounted from another system."""
    cached = load_library().path
    put_foreign(cached)
    prebuild(build.PREBUILT)
    compiler.path.unlink()
    assert found() == load_library().path == build.PREBUILT / cached.name


@pytest.mark.parametrize("bad", [1, 2])
def test_what_does_not_load_hides_nothing_that_does(
    able: Path, compiler: Compiler, bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The image's, the cache's, the home directory's, in this order."""
    prebuild(build.PREBUILT)
    name = TILES.file_name()
    places = [folder / name for folder in (build.PREBUILT, *build.cache_folders())]
    for place in places[1:]:
        place.parent.mkdir(parents=True)
        shutil.copy(places[0], place)
    for place in places[:bad]:
        put_foreign(place)
    compiler.path.unlink()
    assert found() == load_library().path == places[bad]
    assert f"can not be loaded: {places[bad - 1]}" in caplog.text


def test_a_cache_nothing_loads_from_is_not_built_into(
    able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start finds what the first one built; where nothing may be executed at all, no start compiles."""
    first, second = build.cache_folders()
    put_foreign(first / TILES.file_name())
    forbidden = [first]

    def look(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_flag=os.ST_NOEXEC if path.is_relative_to(forbidden[0]) else 0)

    monkeypatch.setattr("os.statvfs", look)
    for _ in range(2):
        assert load_library().path.parent == second and compiler.num_calls() == 1
    shutil.rmtree(second)
    forbidden[0] = able
    with pytest.raises(NoKernels, match=r"no cache can hold the kernels: .*cache.* noexec; .*home.* noexec$"):
        load_library()
    assert compiler.num_calls() == 1


def test_a_user_without_a_home_directory(able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for ask in (check_able, load_library, find_library):
        with pytest.raises(NoKernels, match="no home directory"):
            ask()
    prebuild(build.PREBUILT)
    assert load_library().path.parent == build.PREBUILT


def test_a_system_that_refuses_the_tile_registers(
    able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "gives_tiles", lambda: False)
    assert load_library().path.name == VECTORS.file_name()


def test_tile_registers_are_asked_for_and_may_be_refused() -> None:
    """In processes of their own: once given they stay, and so does the sandbox (seccomp, EPERM for arch_prctl)."""
    if not read_cpu_flags() >= TILES.needs:
        pytest.skip("the processor has no tile registers")
    sandbox = """
import ctypes, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 158), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
held = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(held)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
if prctl(22, 2, ctypes.addressof(program), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    print("none"); raise SystemExit
"""
    ask = "from executor_svc.kernels_cpu.compile import gives_tiles, own_level\nprint(gives_tiles(), own_level().name)"

    def run(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run(ask) in ("True tiles", "False vectors")
    assert run(sandbox + ask) in ("False vectors", "none")


def test_an_image_for_another_kind_of_processor_has_none(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.kernels_cpu.prebuild.is_x86", lambda: False)
    prebuild(able / "prebuilt")
    assert libraries(able / "prebuilt") == []


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "step.so"
    path.write_bytes(b"not a library")
    with pytest.raises(DamagedKernels, match="can not be loaded"):
        Library(path)


def test_a_read_only_cache(able: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    (able / "cache").write_text("a file where the cache should be")
    with pytest.raises(NoKernels, match="cache"):
        load_library()


def test_home_stands_in_for_a_cache_that_can_not_be_written(able: Path, compiler: Compiler) -> None:
    (able / "cache").write_text("a file where the cache should be")
    built = load_library().path
    assert built.parent == able / "home" / ".cache" / "stepwire" / "kernels"
    compiler.path.unlink()
    assert load_library().path == built
    assert libraries(built.parent) == [built]
