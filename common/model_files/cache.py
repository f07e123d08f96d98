"""Where models rest on this machine, and how two processes fill that place without disturbing each other."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ModelError


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/stepwire, else ~/.cache/stepwire. Not created here. Raises ModelError where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base.startswith("/") else Path("~/.cache").expanduser()
    except RuntimeError as error:  # a container's user may have no entry in /etc/passwd
        raise ModelError("this user has no home directory: set XDG_CACHE_HOME to where the cache may be") from error
    return root / "stepwire"


@contextmanager
def exclusive(root: Path) -> Iterator[Path]:
    """Holds the cache's lock, waiting for another process that holds it; yields an empty working directory.

    The directory is on the same file system as the cache, so what is ready moves in atomically; it vanishes at the end.
    Raises ModelError when the cache can not be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / "lock").open("a")
    except OSError as error:
        raise ModelError(f"{root}: the cache can not be written: {error.strerror}") from error
    with lock:
        # Freed by the kernel when the holder dies, so a killed pull blocks nobody.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in root.glob("partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="partial-", dir=root))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
