"""Prints the CPU builds of torch that lie in the wheel folders pip is configured with on this machine, best first.

    python -P deploy/torch_wheels.py            one path a line; nothing when there are none

`pip install torch` from the default index takes a CUDA build of several gigabytes on Linux x86-64; a folder named by
`find-links` often holds a CPU build for this very reason. Whether a wheel fits this interpreter is left to pip, which
refuses one that does not before it unpacks anything. Runs before anything is installed: standard library only.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

OLDEST = (2, 11)
_WHEEL = re.compile(r"torch-(?P<release>\d+(?:\.\d+)+)(?:\+(?P<local>[^-]+))?-")


def configured_folders(config_list: str) -> Iterator[Path]:
    """Local folders among the `find-links` entries of `pip config list` output; remote pages are left out."""
    for line in config_list.splitlines():
        key, _, value = line.partition("=")
        if not key.endswith(".find-links"):
            continue
        for entry in str(ast.literal_eval(value)).split():
            url = urlsplit(entry)
            if url.scheme in ("", "file"):
                yield Path(unquote(url.path)).expanduser()


def cpu_wheels(folders: Iterable[Path], plain_is_cpu: bool) -> list[Path]:
    """Wheels of torch >= 2.11 built for the CPU, newest first.

    `plain_is_cpu`: whether a wheel with no local version is a CPU build, as it is everywhere but on Linux x86-64.
    """
    found: dict[Path, tuple[int, ...]] = {}
    for folder in folders:
        for path in folder.glob("torch-*.whl"):
            match = _WHEEL.match(path.name)
            if match is None:
                continue
            release = tuple(int(part) for part in match["release"].split("."))
            if release >= OLDEST and (match["local"] == "cpu" or (match["local"] is None and plain_is_cpu)):
                found[path] = release
    return sorted(found, key=lambda path: (found[path], "+cpu" in path.name), reverse=True)


def main() -> None:
    """Asks pip for its configuration and prints what it finds."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    for path in cpu_wheels(configured_folders(listed), plain_is_cpu=sys.platform != "linux"):
        print(path)


if __name__ == "__main__":
    main()
