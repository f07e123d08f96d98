"""A collector that is not ours: rotel, an OTLP receiver in Rust, whose debug log prints every span it was sent."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rotel

START_LIMIT_S = 20.0

_FIELD = re.compile(r"^\s*(Trace ID|Parent ID|ID|Name|Kind|Start time|End time|Status code|Status message)\s*: ?(.*)$")
_ITEM = re.compile(r"^\s+-> ([^:]+): ?(.*)$")
_VALUE = re.compile(r"^(Str|Int|Double|Bool|Slice)\((.*)\)$")


@dataclass
class Seen:
    """A span as the receiver understood it. Times: ns since the Unix epoch; `links`: (trace id, span id)."""

    resource: dict[str, str]
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    name: str = ""
    kind: str = ""
    start_ns: int = 0
    end_ns: int = 0
    status: str = ""
    status_message: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)

    @property
    def service(self) -> str:
        return self.resource["service.name"]

    def number(self, name: str) -> float:
        return float(self.attributes[name])


def parse(log: str) -> list[Seen]:
    """Every span in rotel's detailed debug log."""
    spans: list[Seen] = []
    resource: dict[str, str] = {}
    section = ""
    for line in log.splitlines():
        if line.startswith("ResourceSpans #"):
            resource, section = {}, "resource"
        elif line.startswith("ScopeSpans #"):
            section = "scope"
        elif line.startswith("Span #"):
            spans.append(Seen(resource))
            section = "span"
        elif line.startswith("SpanEvent #"):
            section = "event"
        elif line.startswith("SpanLink #"):
            spans[-1].links.append(("", ""))
            section = "link"
        elif line.startswith("Attributes:") and section in ("span", "event", "link"):
            section = "attributes"
        elif section == "span" and (found := _FIELD.match(line)):
            _set(spans[-1], found[1], found[2].strip())
        elif found := _ITEM.match(line):
            key, value = found[1], found[2]
            if section == "resource":
                resource[key] = _plain(value)
            elif section == "attributes":
                spans[-1].attributes[key] = _plain(value)
            elif section == "event" and key == "Name":
                spans[-1].events.append(value)
            elif section == "link" and key in ("Trace ID", "ID"):
                trace_id, span_id = spans[-1].links[-1]
                spans[-1].links[-1] = (value, span_id) if key == "Trace ID" else (trace_id, value)
    return spans


def _plain(value: str) -> str:
    found = _VALUE.match(value)
    return found[2] if found else value


def _set(span: Seen, name: str, value: str) -> None:
    match name:
        case "Trace ID":
            span.trace_id = value
        case "Parent ID":
            span.parent_id = value
        case "ID":
            span.span_id = value
        case "Name":
            span.name = value
        case "Kind":
            span.kind = value
        case "Start time":
            span.start_ns = int(value)
        case "End time":
            span.end_ns = int(value)
        case "Status code":
            span.status = value
        case "Status message":
            span.status_message = value


class Receiver:
    """A running rotel. `stop` ends it properly, which makes it print all it has."""

    def __init__(self, directory: Path) -> None:
        self.port, http_port = _free_ports(2)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._log = directory / "rotel.log"
        self._output = self._log.open("wb")
        program = Path(str(rotel.__file__)).with_name("rotel-agent")
        arguments = {
            "--otlp-grpc-endpoint": f"127.0.0.1:{self.port}",
            "--otlp-http-endpoint": f"127.0.0.1:{http_port}",
            "--debug-log": "traces",
            "--debug-log-verbosity": "detailed",
            "--exporter": "blackhole",
            "--pid-file": str(directory / "rotel.pid"),
            "--log-file": str(directory / "rotel-daemon.log"),
        }
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ROTEL_")}
        self._process = subprocess.Popen(
            [str(program), "start", *(word for pair in arguments.items() for word in pair)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environ,
        )

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert self._process.poll() is None, self._log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert time.monotonic() < deadline, "rotel does not listen"
            time.sleep(0.02)

    def stop(self) -> list[Seen]:
        """Everything it was sent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            finally:
                self._process.kill()
                self._process.wait(20)
                self._output.close()
        return parse(self._log.read_text(errors="replace"))


@contextlib.contextmanager
def receiver(directory: Path) -> Iterator[Receiver]:
    directory.mkdir(parents=True, exist_ok=True)
    running = Receiver(directory)
    try:
        running.wait_until_listening()
        yield running
    finally:
        running.stop()


def _free_ports(count: int) -> list[int]:
    """rotel takes no port 0, so ports are chosen for it; all are held until all are known."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(int(listener.getsockname()[1]))
        return ports
