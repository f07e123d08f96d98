"""The start on a terminal: one bar at its foot and whole lines above it, by itself and under `stepwire up`."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from common.model_files.catalog import model_path
from tests.integration.test_cli import SMALL, STEPWIRE, environment
from tests.unit.models.checkpoints import make_model, save

DEADLINE_S = 240.0
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WIPED = "\x1b[2K"
# How rich takes a bar away: its line ends, the cursor goes up again and the line is wiped.
GONE = re.compile(r"[^\n]*\n(?:\x1b\[\?25h)?\r?\x1b\[1A\x1b\[2K")


def on_a_terminal(command: list[str], until: str) -> tuple[str, int]:
    """Runs `command` with its standard error on a terminal of 200 columns, and asks it to end once it wrote `until`.

    Returns all it wrote there and its exit status.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        start_new_session=True,
        env=environment() | {"TERM": "xterm"},
    )
    os.close(theirs)
    written, end_s = b"", time.monotonic() + DEADLINE_S
    asked = False
    try:
        while time.monotonic() < end_s:
            if not select.select([ours], [], [], end_s - time.monotonic())[0]:
                break
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # nobody holds the other end any more
                break
            if not piece:
                break
            written += piece
            if not asked and until.encode() in written:
                asked = True
                process.send_signal(signal.SIGTERM)
        return written.decode(errors="replace").replace("\r\n", "\n"), process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        os.close(ours)


def lines_of(text: str) -> list[str]:
    """What stands there in the end: of a line that was wiped, what was written last."""
    text = GONE.sub("", text)
    return [ANSI.sub("", line.rpartition(WIPED)[2]).replace("\r", "") for line in text.split("\n")]


def test_the_executor_by_itself(tmp_path: Path) -> None:
    model = save(make_model("llama"), tmp_path / "model")
    flags = ["--model", str(model), "--device", "cpu", "--listen", "127.0.0.1:0", "--num-blocks", "64"]
    text, status = on_a_terminal([sys.executable, "-P", "-m", "executor_svc", *flags], "INFO ready:")
    assert status == 0, text
    drawn = ANSI.sub("", text)
    assert WIPED in text and "warming up ━" in drawn
    lines = lines_of(text)
    for told in (r"64 KV blocks of 16 tokens, \d+ bytes", r"started in [0-9.]+ s: .*", r"ready: .* on cpu"):
        assert any(re.fullmatch(rf"\S+ \S+ executor INFO {told}", line.rstrip()) for line in lines), (told, text)
    assert not any("━" in line for line in lines), "the bar is gone"
    assert "INFO warming up" not in drawn, "told twice"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_up() -> None:
    if model_path() is None:
        pytest.skip("the default model is not on this machine: stepwire models pull")
    up = [*STEPWIRE, "up", "--listen", "127.0.0.1:0", "--threads", "1", *SMALL, "--no-first-prompt", "--once"]
    text, status = on_a_terminal(up, "never")
    assert status == 0, text
    drawn = ANSI.sub("", text)
    assert WIPED in text and "warming up ━" in drawn and '"activity"' not in drawn
    lines = lines_of(text)
    for who in ("executor  | ", "scheduler | "):
        assert any(line.startswith(who) for line in lines), text
    assert any(re.match(r"executor  \| .* INFO started in", line) for line in lines), text
    assert not any("━" in line for line in lines), "the bar is gone"
