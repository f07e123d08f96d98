"""Prints the CPU builds of torch that lie in the wheel folders pip is configured with on this machine, best first.

    python -P deploy/torch_wheels.py            one path a line; nothing when there are none

`pip install torch` from the default index takes a CUDA build of several gigabytes on Linux x86-64; a folder named by
`find-links` often holds a CPU build for this very reason. Wheels for other versions of Python are left out; whether one
fits this machine in every other way is left to pip. Runs before anything is installed: standard library only.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

OLDEST = (2, 11)
_WHEEL = re.compile(r"torch-(?P<release>\d+(?:\.\d+)+)(?:\+(?P<local>[^-]+))?-(?P<python>[^-]+)-")


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


def cpu_wheels(folders: Iterable[Path], python: str, plain_is_cpu: bool) -> list[Path]:
    """Wheels of torch >= 2.11 built for the CPU and for `python` ("cp311"), newest first.

    `plain_is_cpu`: whether a wheel with no local version is a CPU build, as it is everywhere but on Linux x86-64.
    """
    found: dict[Path, tuple[int, ...]] = {}
    for folder in folders:
        for path in folder.glob("torch-*.whl"):
            match = _WHEEL.match(path.name)
            if match is None or python not in match["python"].split("."):
                continue
            release = tuple(int(part) for part in match["release"].split("."))
            if release >= OLDEST and (match["local"] == "cpu" or (match["local"] is None and plain_is_cpu)):
                found[path] = release
    return sorted(found, key=lambda path: (found[path], "+cpu" in path.name), reverse=True)


def local_wheels(python: str) -> list[Path]:
    """What pip's configuration on this machine offers, for Linux images as for an environment here."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    return cpu_wheels(configured_folders(listed), python, plain_is_cpu=sys.platform != "linux")


if __name__ == "__main__":
    for wheel in local_wheels(f"cp{sys.version_info.major}{sys.version_info.minor}"):
        print(wheel)
