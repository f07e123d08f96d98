"""What the CPU kernels are built for and with, and where what was built before may be: in an image or in the cache.

A library is named by its source and by the instructions it may use, never by the machine that built it: one built
elsewhere serves here exactly where the processor has them all. A machine that has no compiler, or lacks the
instructions, serves without; the log says which it is. Loads no torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.errors import ModelError
from common.model_files.cache import cache_dir
from executor_svc.environment import read_cpu_flags

SOURCE: Final = Path(__file__).resolve().parent
# Where an image holds what was built with it; see prebuild.py.
PREBUILT: Final = SOURCE / "prebuilt"
FLAGS: Final = (
    "-std=c++20", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno",
    "-Wall", "-Wextra",
    # GCC's own headers of AVX-512 leave values undefined on purpose.
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
_COMPILERS: Final = ("g++", "clang++", "c++")
_TIME_LIMIT_S: Final = 300
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


class NoKernels(Exception):
    """This machine can not run or build the kernels; the message says why."""


class DamagedKernels(NoKernels):
    """The library that was found, or what would be built there, is none this machine can load."""


@dataclass(frozen=True)
class Level:
    """Instructions the code may use. `options`: how the compiler is told; `needs`: all, as /proc/cpuinfo names them.

    Not `-march=native`: what that means depends on the machine and on what the compiler knows of it.
    """

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]

    def file_name(self) -> str:
        digest = hashlib.sha256()
        for path in sources():
            digest.update(path.read_bytes())
        digest.update(" ".join([*FLAGS, *self.options]).encode())
        return f"step-{self.name}-{digest.hexdigest()[:20]}.so"


_AVX2: Final = frozenset((  # x86-64-v3, with all that it stands on
    "cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2",
    "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave",
))  # fmt: skip
_VECTORS: Final = _AVX2 | {  # x86-64-v4, and two beyond it
    "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni",
}  # fmt: skip
_VECTOR_OPTIONS: Final = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
# Best first.
LEVELS: Final = (
    Level("tiles", (*_VECTOR_OPTIONS, "-mamx-tile", "-mamx-bf16"), _VECTORS | {"amx_tile", "amx_bf16"}),
    Level("vectors", _VECTOR_OPTIONS, _VECTORS),
    Level("avx2", ("-march=x86-64-v3",), _AVX2),
)


def sources() -> list[Path]:
    return sorted([*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")])


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def own_level() -> Level:
    """The best one whose every instruction this processor has and the system lets it use. Raises NoKernels."""
    if not is_x86():
        raise NoKernels(f"they are for x86-64 processors, not for {platform.machine()}")
    flags = read_cpu_flags()
    for level in LEVELS:
        if flags >= level.needs and ("amx_tile" not in level.needs or gives_tiles()):
            return level
    raise NoKernels(f"the processor lacks {', '.join(sorted(LEVELS[-1].needs - flags))}")


def gives_tiles() -> bool:
    """Whether the system gives this process the tile registers, which it does by being asked; a sandbox may refuse.

    Linux, Documentation/arch/x86/xstate.rst: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    """
    arch_prctl, request, tile_data = (ctypes.c_long(number) for number in (158, 0x1023, 18))
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


def find_compiler() -> str:
    """Path of a C++ compiler: $CXX, else the first known one. Raises NoKernels."""
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NoKernels("no C++ compiler is installed (Debian's package g++, or clang)")


def built_before() -> list[Path]:
    """Whole libraries for this processor, an image's own first: caches are shared with other systems. Raises NoKernels.

    Whether one loads is not known yet.
    """
    name = own_level().file_name()
    return [folder / name for folder in (PREBUILT, *cache_folders()) if is_whole(folder / name)]


def check_able() -> None:
    """Raises NoKernels where the library certainly can not be built. Builds nothing."""
    own_level()
    find_compiler()
    if not cache_folders():
        raise NoKernels("there is no home directory to build them in, and XDG_CACHE_HOME names no other place")


def cache_folders() -> list[Path]:
    """The cache's, then the home directory's: in a container the cache may be a volume that is mounted read-only.

    None where this user has no home directory and XDG_CACHE_HOME names no place either.
    """
    try:
        roots = [cache_dir()]
    except ModelError:
        roots = []
    home = os.environ.get("HOME", "")
    if home.startswith("/"):
        roots.append(Path(home, ".cache", "stepwire"))
    return [root / "kernels" for root in dict.fromkeys(roots)]


def is_whole(path: Path) -> bool:
    """Whether it is there and ends in the digest of all before: the linker would run into the end of a cut one."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def build(compiler: str, level: Level, target: Path) -> None:
    """Raises NoKernels with what the compiler said, OSError where `target` can not be written."""
    command = [compiler, *FLAGS, *level.options, str(SOURCE / "step.cpp"), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{compiler} could not be run: {error}") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NoKernels(f"{compiler} failed: {said[0] if said else 'it said nothing'}")
    content = target.read_bytes()
    with target.open("ab") as file:
        file.write(hashlib.sha256(content).digest())
