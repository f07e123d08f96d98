"""One child of the supervisor: started in its own session, its lines handed on, stopped within a deadline."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

EXEC_CHILD: Final = Path(__file__).with_name("exec_child.py")
MAX_LINE_BYTES: Final = 1 << 20

Lines = Callable[[str, str], None]  # (name of the child, line)


class ChildProcess:
    """A running process. Owner: the supervisor's event loop, on the main thread.

    (The parent-death signal fires when the thread that forked ends, so only a thread that lives as long as the process
    may start children.)
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, lines: Lines) -> None:
        self.name = name
        self._process = process
        self._reader = asyncio.create_task(self._read(lines), name=f"{name} output")

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], lines: Lines, environ: Mapping[str, str] | None = None
    ) -> "ChildProcess":
        """Raises OSError when Python itself can't be started; a bad command ends with status 1 and a line."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(EXEC_CHILD), str(os.getpid()), *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=environ,
            limit=MAX_LINE_BYTES,
        )  # fmt: skip
        return cls(name, process, lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for the end of the process and for its last line."""
        status = await self._process.wait()
        # A grandchild that outlives the child may hold the pipe open.
        await asyncio.wait([self._reader], timeout=1.0)
        self._reader.cancel()
        return status

    async def stop(self, deadline_s: float) -> int:
        """Asks the process to end, and kills its whole session once the deadline has passed."""
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), deadline_s)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, lines: Lines) -> None:
        stream = self._process.stdout
        assert stream is not None, "started with a pipe"
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than MAX_LINE_BYTES: the reader dropped it
                line = b"(a line longer than 1 MiB)\n"
            if not line:
                return
            lines(self.name, line.decode(errors="replace").rstrip())
