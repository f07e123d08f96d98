"""Which build of torch deploy/dev installs and from where, with stand-ins for pip and nvidia-smi.

`.venv/bin/python` is a shell script: it writes down what pip is asked to install and says which build that gave.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.requirements import ROOT

FAKE_PYTHON = r"""#!/bin/sh
here=$(dirname "$0")/..
case "$*" in
    "-m pip --version") ;;
    "-P -m pip"*install*torch==*|"-P -m pip"*install*/torch-*)
        shift 6
        echo "$@" >>"$here/pip.log"
        case "$*" in
            *whl/cpu* | *+cpu-*) [ ! -e "$here/no-cpu-build" ] && echo cpu >"$here/torch" ;;
            *) cp "$here/default-build" "$here/torch" ;;
        esac ;;
    "-P -m pip"*) shift 5; echo "$@" >>"$here/pip.log" ;;
    "-P -") cat >/dev/null; cat "$here/torch" ;;
    "-P - "*) cat >/dev/null; [ -e "$here/index-answers" ] ;;
    *torch_wheels.py) cat "$here/wheels" 2>/dev/null ;;
    *requirements.py*) echo triton ;;
    --version) echo Python 3.11 ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


class Checkout:
    """deploy/dev in a directory of its own. `smi`: exit status of nvidia-smi."""

    def __init__(self, at: Path) -> None:
        (at / "deploy").mkdir()
        (at / "client").mkdir()
        for name in ("deploy/dev", "constraints.txt", "constraints-cpu.txt", "pyproject.toml", "client/pyproject.toml"):
            shutil.copy(ROOT / name, at / name)
        self._at, self.venv, self._bin = at, at / ".venv", at / "bin"
        (self.venv / "bin").mkdir(parents=True)
        self._bin.mkdir()
        self._script(self.venv / "bin" / "python", FAKE_PYTHON)
        self.smi(1)
        self.say("torch", "none")
        self.say("default-build", "cuda")

    def _script(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def smi(self, status: int) -> None:
        self._script(self._bin / "nvidia-smi", f'#!/bin/sh\n[ "$*" = -L ] && exit {status}\n')

    def say(self, name: str, text: str = "") -> None:
        (self.venv / name).write_text(text + "\n")

    def install(self, torch: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        environment |= {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "TORCH_VERSION": "2.12.0",
        }
        environment |= {"TORCH": torch} if torch else {}
        command = ["sh", str(self._at / "deploy" / "dev"), "install"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def installs(self) -> list[str]:
        """What pip was asked to install: setuptools, torch unless it was there, the project."""
        log = self.venv / "pip.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


CUDA = "-c constraints.txt --upgrade torch==2.12.0,!=2.12.0+cpu"
INDEX = "--no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.12.0"


@pytest.mark.parametrize(
    ("torch", "smi", "cuda"),
    [("", 0, True), ("auto", 0, True), ("auto", 9, False), ("auto", 127, False), ("cpu", 0, False), ("cuda", 9, True)],
)
def test_auto_follows_nvidia_smi_and_cpu_and_cuda_decide(checkout: Checkout, torch: str, smi: int, cuda: bool) -> None:
    checkout.smi(smi)
    checkout.say("index-answers")
    done = checkout.install(torch)
    assert done.returncode == 0, done.stderr
    setuptools, chosen, project = checkout.installs()
    assert setuptools.endswith("-c constraints.txt setuptools")
    assert chosen == (CUDA if cuda else INDEX)
    assert ("constraints-cpu.txt" in project) is not cuda
    assert ("about 3 GB" in done.stderr) is cuda


def test_a_local_wheel_comes_before_the_index_and_the_index_before_gigabytes(checkout: Checkout) -> None:
    checkout.say("index-answers")
    checkout.say("wheels", "/srv/my wheels/torch-2.13.0+cpu-cp311.whl")
    assert checkout.install("cpu").returncode == 0
    assert checkout.installs()[1] == "--no-deps --no-index /srv/my wheels/torch-2.13.0+cpu-cp311.whl"


def test_without_wheel_and_index_the_default_index_is_taken_and_its_size_said(checkout: Checkout) -> None:
    done = checkout.install("cpu")
    assert done.returncode == 0, done.stderr
    _, chosen, project = checkout.installs()
    assert chosen == "-c constraints.txt torch==2.12.0"
    assert "100 to 250 MB" in done.stderr or "3 GB to download" in done.stderr
    assert "constraints-cpu.txt" not in project  # what came is a CUDA build, and pins triton itself


def test_a_wheel_that_does_not_fit_is_passed_over(checkout: Checkout) -> None:
    checkout.say("wheels", "/srv/torch-2.13.0+cpu-cp311.whl")
    checkout.say("no-cpu-build")
    assert checkout.install("cpu").returncode == 0
    assert len(checkout.installs()) == 4 and checkout.installs()[2] == "-c constraints.txt torch==2.12.0"


def test_a_build_that_is_there_serves_the_cpu_but_not_a_gpu(checkout: Checkout) -> None:
    checkout.say("torch", "cuda")
    assert checkout.install("cpu").returncode == 0 and len(checkout.installs()) == 2
    checkout.say("torch", "cpu")
    assert checkout.install("cuda").returncode == 0
    assert checkout.installs()[3] == CUDA


def test_an_index_without_the_cuda_build_is_one_clear_line(checkout: Checkout) -> None:
    checkout.say("default-build", "cpu")
    done = checkout.install("cuda")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "deploy/dev: this machine's package index gives a CPU build of torch"
    )


def test_what_is_installed_is_not_installed_again(checkout: Checkout) -> None:
    assert checkout.install("cuda").returncode == checkout.install("cuda").returncode == 0
    assert len(checkout.installs()) == 3
