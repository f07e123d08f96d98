"""Receives OTLP on 4317 and prints every span; answers on 13133 like Jaeger's health check. Arguments are ignored."""

import http.server
import socket
import subprocess
from http import HTTPStatus
from pathlib import Path

import rotel

RECEIVER = ("127.0.0.1", 4317)


class Health(http.server.BaseHTTPRequestHandler):
    """200 once the receiver accepts connections."""

    def do_GET(self) -> None:
        try:
            socket.create_connection(RECEIVER, timeout=1).close()
        except OSError:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self.send_response(HTTPStatus.OK)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        """Says nothing: the log is for spans."""


def main() -> None:
    agent = Path(rotel.__file__).with_name("rotel-agent")
    options = ["--otlp-grpc-endpoint", "0.0.0.0:4317", "--exporter", "blackhole"]
    options += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    # As process 1 this gets no default signal handling; the engine ends it after its grace period.
    with subprocess.Popen([agent, "start", *options]):
        http.server.ThreadingHTTPServer(("0.0.0.0", 13133), Health).serve_forever()


if __name__ == "__main__":
    main()
