"""What must stand in the environment before torch is imported, and what the machine has. Loads no torch."""

import math
import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# Read once, when MKL starts: strict conditional numerical reproducibility makes float32 products of a row independent
# of how many other rows there are. executor_svc.numerics checks that at start-up and falls back where it does not hold.
MKL_VARIABLE: Final = "MKL_CBWR"


def prepare_environment(numerics: str, *, cpu_flags: frozenset[str] | None = None) -> None:
    """Sets what `numerics` ("exact" or "fast") needs, unless the operator has set it. Call before importing torch.

    `cpu_flags`: instruction sets of the processor, read from the system when not given.
    """
    try:
        Path.cwd()
    except FileNotFoundError:  # the directory was deleted: MKL ends a process that has none
        os.chdir("/")
    if numerics != "exact" or MKL_VARIABLE in os.environ:
        return
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    if "avx512f" in flags:
        os.environ[MKL_VARIABLE] = "AVX512,STRICT"
    elif "avx2" in flags:
        os.environ[MKL_VARIABLE] = "AVX2,STRICT"
    else:
        os.environ[MKL_VARIABLE] = "COMPATIBLE"


def read_cpu_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction sets of the first processor; empty where the system does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def why_no_triton() -> str:
    """Why Triton's kernels can not run on a GPU of this machine; empty: they can.

    What launches them is C, which Triton compiles when it is first used (its runtime/build.py names the same places).
    """
    if find_spec("triton") is None:
        return "the package triton is missing, which a CUDA build of torch brings"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler (gcc or clang) is installed"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    return "" if Path(headers, "Python.h").is_file() else f"Python's C headers are missing ({headers}/Python.h)"


def own_cpus(threads: int) -> tuple[int, ...]:
    """A processor for each of so many threads to keep to: where they are as many as this process may use. Fewer, or
    more, are better placed by the system. Empty: none."""
    cpus = os.sched_getaffinity(0)
    return tuple(sorted(cpus)) if len(cpus) == threads > 1 else ()


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Processors' worth of time this process's control group has, rounded up; None: no bound that can be read.

    torch counts processors alone: with more threads than there is time for, all stop for the rest of each period.
    """
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:  # version 1
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return None
    if not quota.isdecimal() or not period.isdecimal() or int(quota) == 0 or int(period) == 0:
        return None  # "max", or -1
    return math.ceil(int(quota) / int(period))
