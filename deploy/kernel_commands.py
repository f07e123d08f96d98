"""What `stepwire kernels` does. Imports no torch, so asking again costs nothing."""

import sys
import time

from deploy.progress import ProgressLine
from deploy.terminal import print_json
from executor_svc.kernels_cpu.compile import NoKernels
from executor_svc.kernels_cpu.library import Library, build_library, find_library

WITHOUT = "steps on the CPU run in torch, slower"


def build_kernels(as_json: bool) -> int:
    """Builds them unless they are there; progress on standard error, the path on standard output. Returns a status."""
    begin = time.monotonic()
    try:
        found = find_library()
        library = found or _build()
    except NoKernels as error:
        print(f"stepwire: no CPU kernels, {WITHOUT}: {error}", file=sys.stderr)
        return 1
    if as_json:
        print_json(_described(library) | {"built": found is None, "seconds": round(time.monotonic() - begin, 1)})
    else:
        print(library.path)
    return 0


def show_status(as_json: bool) -> int:
    """Builds nothing. Returns a status: 2 when they are not there."""
    reason, library = "", None
    try:
        library = find_library()
        if library is None:
            reason = "they are not built; the next start does it, or: stepwire kernels build"
    except NoKernels as error:
        reason = f"{WITHOUT}: {error}"
    if as_json:
        print_json(_described(library) | {"reason": reason})
    elif library is None:
        print(f"no CPU kernels: {reason}")
    else:
        print(f"CPU kernels for {library.instructions}: {library.path}")
    return 0 if library is not None else 2


def _build() -> Library:
    """Raises NoKernels."""
    progress = ProgressLine()
    try:
        progress("building the CPU kernels (some seconds, once)", 0, 0)
        return build_library()
    finally:
        progress.done()


def _described(library: Library | None) -> dict[str, object]:
    return {
        "path": str(library.path) if library else None,
        "instructions": library.instructions if library else None,
    }
