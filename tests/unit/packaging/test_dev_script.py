"""deploy/dev and what it runs before anything is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.requirements import ROOT, requirements
from deploy.torch_wheels import configured_folders, cpu_wheels


def dev(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "deploy" / "dev"), *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("args", [(), ("frobnicate",)])
def test_an_unknown_command_prints_the_usage(args: tuple[str, ...]) -> None:
    done = dev(*args)
    assert done.returncode == 2
    assert "sh deploy/dev run" in done.stderr
    assert "TORCH=auto" in done.stderr


def test_an_unknown_kind_of_torch_is_one_clear_line() -> None:
    done = dev("install", TORCH="rocm")
    assert done.returncode == 1
    assert done.stderr == "deploy/dev: TORCH=rocm: expected auto, cpu or cuda\n"


def test_without_a_python_the_line_to_run_is_printed(tmp_path: Path) -> None:
    """A machine with coreutils but neither Python nor apt-get; `/bin/sh` itself is found by its path."""
    for tool in ("dirname", "id"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "deploy" / "dev"), "install"],
        env={"PATH": str(tmp_path), "TORCH": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("deploy/dev: missing: python3 python3-venv")


@pytest.mark.parametrize(
    ("uid", "sudo", "asked"),
    [("0", None, "root"), ("1000", 0, "sudo"), ("1000", 1, ""), ("1000", None, "")],
)
def test_root_or_sudo_installs_venv_else_the_line_is_printed(
    tmp_path: Path, uid: str, sudo: int | None, asked: str
) -> None:
    """A Python without `venv`, on a machine with apt-get. `sudo`: its status unasked; None: no such command."""
    has = {
        "python3": 'case "$*" in *python%d*) echo python3.11-venv ;; *ensurepip*) exit 1 ;; esac',
        "apt-get": f'echo "${{BY:-root}} $*" >>{tmp_path}/asked',
        "id": f"echo {uid}",
    }
    if sudo is not None:
        has["sudo"] = f'[ "$1" != -n ] || exit {sudo}\nBY=sudo exec "$@"'
    for name, lines in has.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    for tool in ("dirname", "mkdir", "env"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "dev", tmp_path / "deploy" / "dev")

    environment = {"PATH": str(tmp_path), "PYTHON": str(tmp_path / "python3"), "TORCH": "cpu"}
    command = ["/bin/sh", str(tmp_path / "deploy" / "dev"), "install"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0  # this Python makes no environment either
    line = "deploy/dev: missing: python3.11-venv. As root run: apt-get update && apt-get install -y python3.11-venv\n"
    assert (line in done.stderr) is (not asked)
    calls = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
    install = "install -y -q --no-install-recommends python3.11-venv"
    assert calls == ([f"{asked} update -q", f"{asked} {install}"] if asked else [])


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_builds_the_kernels_and_does_without_them(tmp_path: Path, status: int) -> None:
    """A checkout whose environment is as an earlier installation left it, but for its commands, which only tell."""
    for name in ("deploy/dev", "pyproject.toml", "client/pyproject.toml", "constraints.txt", "constraints-cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, line in (("python", "exit 0"), ("stepwire", f"echo stepwire $* >>told; echo why >&2; exit {status}")):
        (bin_folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (bin_folder / name).chmod(0o755)
    stamp = "cksum constraints*.txt pyproject.toml client/pyproject.toml; echo $PWD cpu v >.venv/end; cat .venv/end"
    (tmp_path / ".venv" / "stamp-run").write_bytes(subprocess.check_output(["sh", "-c", stamp], cwd=tmp_path))

    environment = {**os.environ, "TORCH": "cpu", "TORCH_VERSION": "v"}
    command = ["sh", str(tmp_path / "deploy" / "dev"), "install"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "why\n")
    assert (tmp_path / "told").read_text() == "stepwire kernels build\n"


@pytest.mark.parametrize("script", ["deploy/dev", "deploy/verify-compose"])
def test_shell_scripts_are_well_formed(script: str) -> None:
    assert subprocess.run(["sh", "-n", str(ROOT / script)], timeout=60).returncode == 0


def test_wheel_folders_are_taken_from_pips_own_configuration() -> None:
    listed = (
        ":env:.find-links='/a'\n"
        "global.find-links='/opt/wheels\\nfile:///srv/more%20wheels https://example.org/wheels'\n"
        "global.timeout='60'\n"
        "install.find-links='/c'\n"
    )
    found = list(configured_folders(listed))
    assert found == [Path("/a"), Path("/opt/wheels"), Path("/srv/more wheels"), Path("/c")]


def test_cpu_wheels_come_newest_first_and_never_a_cuda_build(tmp_path: Path) -> None:
    tail = "-cp311-cp311-manylinux_2_28_x86_64.whl"
    names = ["2.10.1+cpu", "2.11.0+cpu", "2.13.0", "2.13.0+cu130", "2.13.0+cpu", "2.9.0+cpu"]
    for name in names:
        (tmp_path / f"torch-{name}{tail}").touch()
    (tmp_path / f"torchvision-0.29.0+cpu{tail}").touch()
    (tmp_path / "torch-nightly.whl").touch()
    missing = tmp_path / "missing"

    on_linux = cpu_wheels([missing, tmp_path], "cp311", plain_is_cpu=False)
    assert [path.name.split("-")[1] for path in on_linux] == ["2.13.0+cpu", "2.11.0+cpu"]

    elsewhere = cpu_wheels([tmp_path], "cp311", plain_is_cpu=True)
    assert [path.name.split("-")[1] for path in elsewhere] == ["2.13.0+cpu", "2.13.0", "2.11.0+cpu"]

    assert cpu_wheels([tmp_path], "cp313", plain_is_cpu=False) == []


def test_requirements_leave_out_the_project_itself() -> None:
    lines = requirements(["project", "executor"])
    assert not [line for line in lines if line.startswith("stepwire")]
    assert {"grpcio>=1.81.1", "torch>=2.11"} <= set(lines)


def test_requirements_as_deploy_dev_asks_for_them() -> None:
    command = [sys.executable, "-P", str(ROOT / "deploy" / "requirements.py"), "test"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert listed == requirements(["test"])
