"""Drives the compose stack for deploy/verify_compose.py: the docker command line, and what the engine reports of it."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class CommandFailed(Exception):
    """A docker command that should have worked; the message holds the end of what it said."""


def docker(*args: str, timeout_s: float = 120, environment: Mapping[str, str] | None = None) -> str:
    """Runs one docker command in the checkout and returns what it printed, both streams. Raises CommandFailed."""
    done = subprocess.run(
        ["docker", *args],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise CommandFailed(f"docker {' '.join(args)}\n" + "\n".join(done.stdout.splitlines()[-25:]))
    return done.stdout


class Stack:
    """The services of one compose project of its own, so that a stack of the user's stays as it is."""

    project = "stepwire-verify"

    def __init__(self, files: list[Path], environment: Mapping[str, str]) -> None:
        self._files = [part for file in files for part in ("-f", str(file))]
        self._environment = environment

    def compose(self, *args: str, timeout_s: float = 120) -> str:
        return docker(
            "compose", "-p", self.project, *self._files, *args, timeout_s=timeout_s, environment=self._environment
        )

    def container(self, service: str) -> str:
        return self.compose("ps", "-aq", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(docker("inspect", self.container(service)))
        return found[0]

    def run_inside(self, service: str, *command: str) -> str:
        return docker("exec", self.container(service), *command)

    def writable(self, service: str, path: str) -> bool:
        """Whether the service's own user can create a file in `path`."""
        try:
            self.run_inside(service, "sh", "-c", f"touch {path}/probe && rm {path}/probe")
        except CommandFailed:
            return False
        return True

    def kill_process(self, service: str) -> None:
        """SIGKILL to the service's process, from outside its container.

        Not `docker kill`: the engine takes that for a wish of the user and would not restart.
        """
        pid = self.inspect(service)["State"]["Pid"]
        kill = f"import os; os.kill({pid}, 9)"
        docker("run", "--rm", "--pid=host", "python:3.11-slim", "python", "-c", kill)


class Events:
    """What the engine says of the project's containers, in its own order and time, from construction to `read`."""

    def __init__(self, project: str) -> None:
        label = f"label=com.docker.compose.project={project}"
        command = ["docker", "events", "--format", "{{json .}}", "--filter", "type=container", "--filter", label]
        for kind in ("start", "die", "health_status"):  # few: nobody empties the pipe before `read`
            command += ["--filter", f"event={kind}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read(self) -> list[tuple[float, str, str, str]]:
        """Ends the listening. Rows of (seconds, service, action, exit code or "")."""
        self._process.terminate()
        lines = self._process.communicate(timeout=30)[0].splitlines()
        rows: list[tuple[float, str, str, str]] = []
        for event in map(json.loads, lines):
            attributes = event["Actor"]["Attributes"]
            service = attributes.get("com.docker.compose.service", "")
            rows.append((event["timeNano"] / 1e9, service, event["Action"], attributes.get("exitCode", "")))
        return rows

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
