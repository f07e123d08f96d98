"""Builds the CPU kernels for every level into one directory: for an image, whose machine is not known yet.

    python -P -m executor_svc.kernels_cpu.prebuild DIRECTORY

The directory belongs beside this file, as `prebuilt`. Nothing is built, and that is no failure, where processors are of
another kind.
"""

import sys
from pathlib import Path

from executor_svc.kernels_cpu.compile import LEVELS, NoKernels, build, find_compiler, is_x86


def prebuild(target: Path) -> None:
    """Raises NoKernels."""
    target.mkdir(parents=True, exist_ok=True)
    for level in LEVELS if is_x86() else ():
        build(find_compiler(), level, target / level.file_name())


if __name__ == "__main__":
    try:
        prebuild(Path(sys.argv[1]))
    except NoKernels as error:
        sys.exit(f"the CPU kernels could not be built: {error}")
