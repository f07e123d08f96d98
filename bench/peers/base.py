"""What a server needs to stand in the comparison, and how one is started and stopped."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bench.load import Ask, Workload

START_S: Final = 180.0
STOP_S: Final = 20.0
_TAIL: Final = 2000


@dataclass(frozen=True)
class Setup:
    """What the peers are given. `threads`: that compute, each. `model`: the GGUF file; `llama_server`, `vllm_python`:
    programs, empty: none."""

    threads: int
    model: Path
    vocab_size: int
    llama_server: str = ""
    vllm_python: str = ""


class Peer(Protocol):
    """One way of serving the model, in processes of its own. `weights`: "file" (as they are there) or "bf16": like is
    set beside like."""

    name: str
    weights: str

    def missing(self) -> str:
        """Why it can not be measured here; empty: it can."""
        ...

    def can_serve(self, load: Workload) -> bool: ...

    def version(self) -> str: ...

    def serving(self, load: Workload) -> AbstractAsyncContextManager[Ask]:
        """Runs while the context lasts, ready at its beginning, its prefix cache off. Raises RuntimeError."""
        ...


class Child:
    """A server's process. Its output goes to a file, whose end is shown when it fails."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self._log = log

    async def until(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        """Raises RuntimeError when the process ends before, or needs longer than START_S."""
        end = asyncio.get_running_loop().time() + START_S
        while not await is_ready():
            if self._process.poll() is not None or asyncio.get_running_loop().time() > end:
                what = "did not get ready" if self._process.poll() is None else f"ended with {self._process.returncode}"
                raise RuntimeError(f"{self._process.args!r} {what}: {self._log.read_text(errors='replace')[-_TAIL:]}")
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def child(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Runs `command` while the context lasts. `environ` goes on top of our own."""
    with tempfile.TemporaryDirectory(prefix="stepwire-peer-") as directory:
        log = Path(directory, "log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=os.environ | (environ or {})
            )
        own = Child(process, log)
        try:
            yield own
        finally:
            own.stop()


@asynccontextmanager
async def listening(command: Sequence[str], port: int, environ: Mapping[str, str] | None = None) -> AsyncIterator[None]:
    """A child with HTTP on that port of the loopback address, once GET /health says 200."""

    async def is_healthy() -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
        except OSError:
            return False
        return b" 200 " in status

    with child(command, environ) as own:
        await own.until(is_healthy)
        yield


def output_of(command: Sequence[str]) -> str:
    """What it printed, on either stream, stripped; a failure's too."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return (done.stdout + done.stderr).strip()


def python() -> list[str]:
    return [sys.executable, "-P"]


def address_in(file: Path) -> str:
    """The first address a service of ours wrote there; empty: none yet."""
    return file.read_text().partition("\n")[0].strip() if file.exists() else ""
