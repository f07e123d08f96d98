"""Builds the CPU kernels where they run, once: into the cache directory, named by their source and the processor.

A machine without a compiler or without the instructions they need serves without them; the log says which it is.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common.errors import ModelError
from common.model_files.cache import cache_dir, exclusive
from executor_svc.environment import read_cpu_flags

SOURCE: Final = Path(__file__).resolve().parent
FLAGS: Final = (
    "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno",
    "-Wall", "-Wextra",
    # GCC's own headers of AVX-512 leave values undefined on purpose.
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
# What the code can not do without; tile registers (amx_bf16) it uses where they are.
NEEDED: Final = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "fma"})
_COMPILERS: Final = ("g++", "clang++", "c++")
_TIME_LIMIT_S: Final = 300


class NoKernels(Exception):
    """This machine can not run or build the kernels; the message says why."""


def sources() -> list[Path]:
    return sorted([*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp")])


def find_compiler() -> str:
    """Path of a C++ compiler: $CXX, else the first known one. Raises NoKernels."""
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NoKernels("no C++ compiler (g++ or clang++) is installed")


def check_able() -> None:
    """Raises NoKernels where this machine certainly can not have them. Builds nothing."""
    name = _name(read_cpu_flags())
    if not any((folder / name).is_file() for folder in _folders()):
        find_compiler()


def _name(flags: frozenset[str]) -> str:
    """Of the library. Raises NoKernels where the processor lacks what the code can not do without."""
    if not flags >= NEEDED:
        raise NoKernels(f"the processor lacks {', '.join(sorted(NEEDED - flags))}")
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    digest.update(" ".join([*FLAGS, *sorted(flags)]).encode())
    return f"step-{digest.hexdigest()[:20]}.so"


def kernel_library() -> Path:
    """The shared library for this processor, built unless it is there. Raises NoKernels."""
    name, folders = _name(read_cpu_flags()), _folders()
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    compiler, refusals = find_compiler(), []
    for folder in folders:
        try:
            # A lock of their own: whoever fetches a model holds the cache's for as long as that takes.
            with exclusive(folder) as work:
                if not (folder / name).is_file():
                    build(compiler, FLAGS, work / name)
                    (work / name).replace(folder / name)
        except (OSError, ModelError) as error:
            refusals.append(str(error))
        else:
            return folder / name
    raise NoKernels(f"the kernels could not be put into the cache: {'; '.join(refusals)}")


def _folders() -> list[Path]:
    """The cache's, then the home directory's: in a container the cache may be a volume that is mounted read-only."""
    home = os.environ.get("HOME", "")
    second = [Path(home, ".cache", "stepwire")] if home.startswith("/") else []
    return [root / "kernels" for root in dict.fromkeys([cache_dir(), *second])]


def build(compiler: str, flags: Sequence[str], target: Path) -> None:
    """Raises NoKernels with what the compiler said."""
    command = [compiler, *flags, str(SOURCE / "step.cpp"), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{compiler} could not be run: {error}") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise NoKernels(f"{compiler} failed: {said[0] if said else 'it said nothing'}")
