"""What deploy/verify_compose.py works with: its report, the versions, Jaeger or a stand-in, a build of torch."""

import contextlib
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Final

from deploy.compose_stack import ROOT, CommandFailed, docker
from deploy.torch_wheels import local_wheels

JAEGER: Final = "jaegertracing/jaeger:2.20.0"


class Report:
    """Lines as they come, on the terminal and at the end in a file."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed = 0

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def check(self, holds: bool, what: str, detail: object = "") -> None:
        self.failed += not holds
        self.say(f"{'ok  ' if holds else 'FAIL'} {what}" + (f": {detail}" if detail != "" else ""))


def versions(report: Report) -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    report.say(f"commit {commit or 'unknown'}, {time.strftime('%Y-%m-%d')}, {platform.system()} {platform.machine()}")
    report.say("engine " + docker("version", "--format", "{{.Server.Version}} (API {{.Server.APIVersion}})").strip())
    report.say(docker("compose", "version").strip())
    report.say("base image python:3.11-slim with " + docker("run", "--rm", "python:3.11-slim", "python", "-V").strip())
    report.say("buildx " + docker("buildx", "version").strip())


@contextlib.contextmanager
def jaeger(report: Report) -> Iterator[bool]:
    """Pulls Jaeger, or lends the stand-in its name for the time. Yields whether it is the real one."""
    try:
        docker("pull", "-q", JAEGER, timeout_s=600)
    except (CommandFailed, subprocess.TimeoutExpired):
        if not _is_standin():
            report.say(f"{JAEGER} is the copy on this machine")
            yield True
            return
    else:
        report.say(f"{JAEGER} pulled")
        yield True
        return
    report.say(f"{JAEGER} can't be pulled here. A stand-in has its name: an OTLP receiver (rotel) that prints spans.")
    report.say("     deploy/jaeger.yaml was not read by Jaeger, and Jaeger's own page was not seen.")
    with tempfile.TemporaryDirectory() as context:
        for file in ("deploy/standin/Dockerfile", "deploy/standin/standin.py", "constraints.txt"):
            shutil.copy(ROOT / file, context)
        docker("build", "-q", "--secret", "id=pip,src=deploy/pip.conf", "-t", JAEGER, context, timeout_s=900)
    try:
        yield False
    finally:
        docker("rmi", "-f", JAEGER)


def _is_standin() -> bool:
    """Whether what has Jaeger's name on this machine is the stand-in, or nothing."""
    try:
        labels = docker("image", "inspect", "--format", "{{json .Config.Labels}}", JAEGER)
    except CommandFailed:
        return True
    return "stepwire.standin" in labels


@contextlib.contextmanager
def local_torch(report: Report) -> Iterator[None]:
    """Lends deploy/wheels/cpu a locally configured wheel of torch that fits the images' Python, if there is one."""
    folder = ROOT / "deploy" / "wheels" / "cpu"
    fitting = local_wheels("cp311")
    given = sorted(folder.glob("torch-*.whl"))
    if given or not fitting:
        source = f"from deploy/wheels/cpu: {given[-1].name}" if given else "from an index"
        report.say(f"torch for the executor's image comes {source}")
        yield
        return
    lent = folder / fitting[0].name
    shutil.copy(fitting[0], lent)
    report.say(f"torch for the executor's image comes from a folder of wheels: {lent.name}")
    try:
        yield
    finally:
        lent.unlink()
