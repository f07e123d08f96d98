"""`stepwire chat` on a terminal of its own, as a person uses it."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest

from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from tests.unit.client.fake_server import answer, serving

DEADLINE_S = 60.0


# Tests that run in the background inherit that SIGINT is ignored; a program on a terminal does not. Not by preexec_fn:
# that forks, beside the threads of this process that are inside gRPC, and now and then the child aborts.
INTERRUPTIBLE = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('deploy', run_name='__main__')"
)


class Terminal:
    """The person's end of a pseudo terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seen = ""
        self._read = 0

    def read_until(self, text: str) -> None:
        """Waits until `text` came after what was read before."""
        give_up = time.monotonic() + DEADLINE_S
        while text not in self.seen[self._read :]:
            assert time.monotonic() < give_up, f"no {text!r} in {self.seen!r}"
            if select.select([self._fd], [], [], 0.5)[0]:
                try:
                    data = os.read(self._fd, 4096)
                except OSError:  # the other end closed
                    data = b""
                assert data, f"the program left; it wrote {self.seen!r}"
                self.seen += data.decode(errors="replace")
        self._read = self.seen.index(text, self._read) + len(text)

    def write(self, data: bytes) -> None:
        os.write(self._fd, data)


def slow_then_usual(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """The message "long" is answered without end."""
    if request.chat.messages[-1].content != "long":
        yield from answer(request, context)
        return
    yield pb.GenerateResponse(started=pb.Started(request_id="r"), delta=pb.Delta(text="begins"))
    while context.is_active():
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_interrupt_cancels_the_answer_and_end_of_file_the_conversation() -> None:
    with serving() as (server, address):
        server.script = slow_then_usual
        own, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", INTERRUPTIBLE, "chat", "--address", address],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        terminal = Terminal(own)
        try:
            terminal.read_until("> ")
            terminal.write(b"hello\n")
            terminal.read_until("Hello world")
            terminal.read_until("> ")
            terminal.write(b"long\n")
            terminal.read_until("begins")
            process.send_signal(signal.SIGINT)  # what Ctrl-C is, on the terminal that controls the program
            terminal.read_until("> ")
            assert server.cancelled.wait(DEADLINE_S), "the request ran on"
            terminal.write(b"again\n")
            terminal.read_until("Hello world")
            terminal.read_until("> ")
            terminal.write(b"\x04")
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(own)
        contents = [[m.content for m in request.chat.messages] for request in server.requests]
        assert contents == [["hello"], ["hello", "Hello world", "long"], ["hello", "Hello world", "again"]]
