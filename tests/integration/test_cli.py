"""`stepwire` as a user runs it: real processes, the real default model."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.model_files.catalog import model_path
from stepwire_client import Client, Delta

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

STEPWIRE = [sys.executable, "-P", "-m", "deploy.cli"]
START_S = 240
# What follows leaves no other token near, in whatever batch or chunk it is computed.
COUNTING, COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,", 32
SMALL = ["--max-num-seqs", "4", "--kv-cache-memory", "64MiB"]


@pytest.fixture(autouse=True)
def _pulled() -> None:
    if model_path() is None:
        pytest.skip("the default model is not on this machine: stepwire models pull")


def environment() -> dict[str, str]:
    """This process's environment without configuration of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("STEPWIRE_", "OTEL_"))}


def children_of(pid: int) -> list[int]:
    """Direct children, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Up:
    """A running `stepwire up`: its address, its standard error so far, its process."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*STEPWIRE, "up", "--listen", "127.0.0.1:0", "--threads", "1", *SMALL, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.log: list[str] = []
        self.address = ""
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.match(r"Serving on (\S+)\. Call it:", line):
                self.address = found[1]
                self._serving.set()
        self._serving.set()

    def wait_until_serving(self) -> None:
        assert self._serving.wait(START_S), "".join(self.log)
        assert self.address, "".join(self.log)

    def wait(self) -> int:
        status = self.process.wait(START_S)
        self._reader.join(10)
        return status

    def said(self) -> str:
        return "".join(self.log)


@contextmanager
def up(*flags: str) -> Iterator[Up]:
    running = Up(*flags)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
            try:
                running.wait()
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.wait()
        assert running.process.stdout is not None and running.process.stderr is not None
        running.process.stdout.close()
        running.process.stderr.close()


def call(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STEPWIRE, *arguments], input=stdin, capture_output=True, text=True, timeout=120, env=environment()
    )


def test_up_once_answers_and_leaves_nothing_behind() -> None:
    with up("--once") as running:
        assert running.wait() == 0, running.said()
        assert running.process.stdout is not None
        answer = running.process.stdout.read()
        assert "light" in answer or "sky" in answer, answer + running.said()
        assert "> Why is the sky blue?" in running.said()
        assert not children_of(running.process.pid)


def test_up_serves_calls_survives_its_executor_and_stops_on_interrupt() -> None:
    with up("--no-first-prompt") as running:
        running.wait_until_serving()
        address = ["--address", running.address]

        greedy = ["--max-tokens", str(COUNTED), "--temperature", "0"]
        done = call("generate", COUNTING, *address, "--json", *greedy)
        assert done.returncode == 0, done.stderr + running.said()
        first = json.loads(done.stdout)
        assert first["usage"]["completion_tokens"] == len(first["token_ids"]) == COUNTED
        assert call("generate", "-", *address, "--max-tokens", "4", stdin="Hello").returncode == 0

        chatted = call("chat", *address, "--json", "--max-tokens", "4", stdin="Hello\nAgain\n")
        assert chatted.returncode == 0, chatted.stderr
        turns = [json.loads(line) for line in chatted.stdout.splitlines()]
        assert len(turns) == 2 and turns[1]["usage"]["prompt_tokens"] > turns[0]["usage"]["prompt_tokens"]

        shown = json.loads(call("info", *address, "--json").stdout)
        assert shown["health"] == {"ready": "serving", "alive": "serving"}
        assert shown["stats"]["running"] == 0 and shown["stats"]["executors"][0]["connected"]

        refused = call("generate", "x", *address, "--temperature", "-1")
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "temperature" in refused.stderr

        children = children_of(running.process.pid)
        executor = next(pid for pid in children if b"executor_svc" in Path(f"/proc/{pid}/cmdline").read_bytes())
        tokens: list[int] = []
        with Client(running.address) as client:
            for event in client.generate(COUNTING, max_tokens=COUNTED, temperature=0.0):
                if isinstance(event, Delta):
                    if not tokens:
                        os.kill(executor, signal.SIGKILL)
                    tokens += event.token_ids
        assert tokens == first["token_ids"], running.said()
        assert "the executor ended (SIGKILL)" in running.said()

        children = children_of(running.process.pid)
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0, running.said()
        assert not any(alive(pid) for pid in children)
        stops = [line for line in running.log if "stopping the" in line]
        assert ["scheduler" in line for line in stops] == [True, False]


def test_up_leaves_with_2_when_the_port_is_taken() -> None:
    with up("--no-first-prompt") as running:
        running.wait_until_serving()
        second = subprocess.run(
            [*STEPWIRE, "up", "--listen", running.address, "--threads", "1"],
            capture_output=True, text=True, timeout=START_S, env=environment(),
        )  # fmt: skip
        assert second.returncode == 2, second.stderr
        assert running.address in second.stderr and "Traceback" not in second.stderr
        assert call("info", "--address", running.address).returncode == 0, "the first was disturbed"


def test_models_list_names_the_pulled_model() -> None:
    listed = json.loads(call("models", "list", "--json").stdout)
    assert Path(listed[0]["path"]).is_file()
    assert call("models", "path").stdout.strip() == listed[0]["path"]
