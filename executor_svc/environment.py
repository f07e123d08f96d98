"""What must stand in the environment before torch is imported. Loads no torch."""

import os
from pathlib import Path
from typing import Final

# Read once, when MKL starts: strict conditional numerical reproducibility makes float32 products of a row independent
# of how many other rows there are. executor_svc.numerics checks that at start-up and falls back where it does not hold.
MKL_VARIABLE: Final = "MKL_CBWR"


def prepare_environment(numerics: str, *, cpu_flags: frozenset[str] | None = None) -> None:
    """Sets what `numerics` ("exact" or "fast") needs, unless the operator has set it. Call before importing torch.

    `cpu_flags`: instruction sets of the processor, read from the system when not given.
    """
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
