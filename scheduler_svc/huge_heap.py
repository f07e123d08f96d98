"""The scheduler's heap in huge pages.

Each request is a few dozen small objects, found again long after they were made. In pages of 4 KiB the way to each is
looked up in tables that are themselves cold, on a virtual machine twice over. glibc's malloc asks for huge pages when
told so, Python's own allocator can not: so the program starts with the one and without the other.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FIRST_GLIBC: Final = (2, 35)


def huge_heap(environ: Mapping[str, str], libc: str, mode: str) -> dict[str, str]:
    """Variables to start with. Empty: nothing to do, because it was started so, the operator chose (PYTHONMALLOC, or
    that tunable), or the system has none: another libc (`libc`: name and version), or huge pages are off (`mode`: as in
    sysfs)."""
    tunables = environ.get("GLIBC_TUNABLES", "")
    name, _, version = libc.partition(" ")
    chosen = "PYTHONMALLOC" in environ or "malloc.hugetlb" in tunables
    if chosen or name != "glibc" or not mode or "[never]" in mode:
        return {}
    if tuple(int(part) for part in version.split(".")[:2]) < _FIRST_GLIBC:
        return {}
    return {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": ":".join(filter(None, (tunables, "glibc.malloc.hugetlb=1")))}


def exec_with_huge_heap() -> None:
    """Starts this program over with them, as the same process. Call first, before anything is open."""
    try:
        libc, mode = os.confstr("CS_GNU_LIBC_VERSION") or "", _HUGE_PAGES.read_text()
    except (OSError, ValueError):
        return
    added = huge_heap(os.environ, libc, mode)
    if added:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})
