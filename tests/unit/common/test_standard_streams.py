"""Standard streams that are closed or broken, and an interrupt before the program hears it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 60.0


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of sh in which `$python` is this interpreter."""
    environ = {**os.environ, "python": sys.executable}
    return subprocess.run(["sh", "-c", line], env=environ, capture_output=True, text=True, timeout=DEADLINE_S)


def test_closed_streams_are_filled(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "from common.standard_streams import fill_standard_streams\n"
        "fill_standard_streams()\n"
        "for number in range(3):\n"
        "    os.fstat(number)\n"
        "assert sys.stdin.read() == ''\n"
        "print('out'), print('err', file=sys.stderr)\n"
        "done = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "assert done > 2, done\n"
        "child = 'import os; [os.fstat(n) for n in range(3)]'\n"
        "os.write(done, str(subprocess.run([sys.executable, '-S', '-c', child]).returncode).encode())\n"
    )
    done = tmp_path / "done"
    assert shell(f'exec "$python" {program} {done} <&- >&- 2>&-').returncode == 0
    assert done.read_text() == "0"


def test_streams_that_are_there_are_left_alone() -> None:
    line = "from common.standard_streams import *; fill_standard_streams(); print(input())"
    assert shell(f'echo through | "$python" -c "{line}"').stdout == "through\n"


@pytest.mark.parametrize("command", ["generate - --address 127.0.0.1:1 <&-", "chat --address 127.0.0.1:1 <&-"])
def test_a_closed_input_is_an_empty_one(command: str) -> None:
    assert "a defect" not in shell(f'"$python" -P -m deploy.cli {command}').stderr


def test_an_error_that_can_not_be_shown_is_no_output() -> None:
    done = shell('"$python" -P -m deploy.cli models path owner/none 2>&-')
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("service", ["scheduler_svc", "executor_svc"])
def test_help_that_nobody_takes_is_no_traceback(service: str) -> None:
    done = shell(f'exec "$python" -P -m {service} --help >/dev/full')
    assert done.returncode != 0 and "No space left" in done.stderr and "Traceback" not in done.stderr
    with subprocess.Popen(
        [sys.executable, "-P", "-m", service, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("service", ["scheduler_svc", "executor_svc"])
def test_a_service_interrupted_while_it_starts_ends_without_a_traceback(service: str, tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-P", "-m", service], env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("module", ["typer", "stepwire_client", "stepwire_client.errors"])
def test_a_command_interrupted_while_it_loads_ends_without_a_traceback(module: str) -> None:
    """Between the first import and the last, that of what a failure is told with."""
    hook = (
        "import os, runpy, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['stepwire', 'info', '--address', '\\udcff']\n"
        "runpy.run_module('deploy', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", hook], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_message_that_can_not_be_written_stops_nobody() -> None:
    line = "from deploy.terminal import err; [err('x' * 9000) for _ in range(50)]; print('goes on')"
    assert shell(f'"$python" -c "{line}" 2>/dev/full').stdout == "goes on\n"
    with subprocess.Popen(
        [sys.executable, "-c", line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stderr.close()
        assert process.stdout.read() == "goes on\n"
    assert process.returncode == 0
