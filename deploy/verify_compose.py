"""Brings the compose stack up for real, checks what docker-compose.yml promises, and takes it down again.

    sh deploy/verify-compose [--record FILE]
    sh deploy/verify-compose --cuda-image [--record FILE]      see deploy/verify_gpu.py

Needs a Docker engine with compose. Where Jaeger's image can't be pulled, a stand-in takes its name (deploy/standin) and
the report says so. A wheel of torch that pip is configured with locally is put into deploy/wheels/cpu for the time.
"""

import argparse
import contextlib
import hashlib
import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from deploy.compose_inputs import Report, jaeger, local_torch, versions
from deploy.compose_stack import ROOT, CommandFailed, Events, Stack, docker
from deploy.ports import free_port
from deploy.verify_gpu import check_gpu_file, verify_cuda_image
from stepwire_client import Client, Delta, Finished, FinishReason, StepwireError

SERVICES: Final = ("executor", "scheduler", "jaeger")
PROMPT: Final = "The history of the lighthouse begins"
# Exact, so that tokens can be compared; one thread, so that other work on the machine disturbs little.
OVERRIDE: Final = 'services: {executor: {environment: {STEPWIRE_NUMERICS: exact, STEPWIRE_THREADS: "1"}}}\n'
TOKENS: Final = 96
DRAINED: Final = 24  # few enough for the drain on a busy machine


def eventually(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Polls until it holds; False when time is up."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def check_order(report: Report, rows: list[tuple[float, str, str, str]]) -> None:
    """From the engine's events: who started and became healthy when."""

    def first(service: str, action: str) -> float:
        return next((at for at, whose, what, _ in rows if whose == service and what == action), float("inf"))

    begin = rows[0][0] if rows else 0.0
    for at, service, action, code in rows:
        if action in ("start", "die") or action.startswith("health_status"):
            report.say(f"     {at - begin:6.1f} s  {service:<10} {action}{' with ' + code if code else ''}")
    model_end = first("model", "die")
    code = next((code for _, whose, what, code in rows if whose == "model" and what == "die"), "")
    report.check(code == "0" and model_end < first("executor", "start"), "the executor starts after the model is there")
    healthy = first("executor", "health_status: healthy")
    report.check(healthy < first("scheduler", "start"), "the scheduler starts once the executor is healthy")
    report.check(first("scheduler", "health_status: healthy") < float("inf"), "the scheduler becomes healthy")
    report.check(first("jaeger", "health_status: healthy") < float("inf"), "jaeger becomes healthy (wget on 13133)")


def check_confinement(report: Report, stack: Stack) -> None:
    for service in SERVICES:
        status = dict(re.findall(r"^(\w+):\s*(.*)$", stack.run_inside(service, "cat", "/proc/1/status"), re.MULTILINE))
        report.check(status["Uid"].split() == ["10001"] * 4, f"{service} runs as uid 10001", status["Uid"].split()[0])
        confined = int(status["CapEff"], 16) == 0 and status["NoNewPrivs"] == "1"
        report.check(confined, f"{service} has no capabilities and gains no privileges")
        report.check(not stack.writable(service, "/") and stack.writable(service, "/tmp"), f"{service}: root read-only")
    for service in ("executor", "scheduler"):
        report.check(stack.writable(service, "/home/stepwire"), f"{service}: HOME writable (tmpfs)")
        report.check(not stack.writable(service, "/models"), f"{service}: the model's volume read-only")
    try:
        stack.run_inside("scheduler", "python", "-c", "import torch")
    except CommandFailed:
        report.check(True, "the scheduler's image has no torch")
    else:
        report.check(False, "the scheduler's image has no torch")
    bound = stack.inspect("executor")["HostConfig"]["Memory"]
    cache = re.findall(r"KV blocks of \d+ tokens, (\d+) bytes", docker("logs", stack.container("executor")))
    fits = bool(cache) and int(cache[-1]) < bound
    detail = f"{cache[-1] if cache else '?'} of {bound} bytes"
    report.check(fits, "the executor's cache fits the container's memory", detail)
    for service, ports in (("scheduler", ["50051/tcp"]), ("jaeger", ["16686/tcp"]), ("executor", [])):
        published = {k: v for k, v in stack.inspect(service)["NetworkSettings"]["Ports"].items() if v}
        loopback = all(binding["HostIp"] == "127.0.0.1" for v in published.values() for binding in v)
        report.check(list(published) == ports and loopback, f"{service} publishes {ports or 'nothing'}, on loopback")


def check_kernels(report: Report, stack: Stack) -> None:
    """The CPU kernels that were built with the image: found, loaded, and no compiler beside them."""
    built = json.loads(stack.compose("config", "--format", "json"))["services"]["executor"]["build"]
    compiler = (built.get("args") or {}).get("COMPILER")
    status = 'stepwire kernels status || true; command -v g++ gcc || echo "no compiler"'
    said = stack.run_inside("executor", "sh", "-c", status).strip()
    what = "was built without kernels" if compiler == "" else "brings its kernels"
    report.check(is_as_built(said, compiler), f"the executor's image {what}", said)


def is_as_built(said: str, compiler: str | None) -> bool:
    """Of an image's words on its kernels. `compiler`: COMPILER as it was built with; None: the Dockerfile's default."""
    built = "no C++ compiler is installed" if compiler == "" else "prebuilt/step-"
    other = ("the processor lacks", "they are for x86-64 processors")
    return said.endswith("no compiler") and any(words in said for words in (built, *other))


def tokens_of(
    client: Client, num_tokens: int, at_token: int = 0, act: Callable[[], None] | None = None
) -> tuple[list[int], Any, float]:
    """One greedy request; `act` is called once `at_token` tokens have come. Tokens, last event, longest gap (s)."""
    tokens: list[int] = []
    last: Any = None
    longest, before = 0.0, time.monotonic()
    with client.generate(PROMPT, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, deadline=900) as events:
        for event in events:
            now = time.monotonic()
            longest, before, last = max(longest, now - before), now, event
            if isinstance(event, Delta):
                tokens += event.token_ids
            if act is not None and len(tokens) >= at_token:
                act()
                act, before = None, time.monotonic()
    return tokens, last, longest


def check_serving(report: Report, stack: Stack, client: Client) -> None:
    answer = client.chat([{"role": "user", "content": "Say hello."}], max_tokens=24, temperature=0.0, deadline=600)
    report.check(bool(answer.text.strip()), "a chat is answered through the published port", repr(answer.text))

    calm, _, _ = tokens_of(client, TOKENS)
    restarts = stack.inspect("executor")["RestartCount"]
    tokens, last, gap = tokens_of(client, TOKENS, TOKENS // 4, lambda: stack.kill_process("executor"))
    whole = isinstance(last, Finished) and last.reason is FinishReason.MAX_TOKENS and len(tokens) == TOKENS
    report.check(whole, f"executor killed after {TOKENS // 4} of {TOKENS} tokens: the request ends whole")
    report.check(tokens == calm, "its tokens are those of an undisturbed run (numerics=exact)")
    restarted = stack.inspect("executor")["RestartCount"] - restarts
    report.check(restarted >= 1, "the executor was restarted by its policy", f"{restarted} time(s), pause {gap:.1f} s")

    def healthy() -> bool:
        return bool(stack.inspect("executor")["State"]["Health"]["Status"] == "healthy")

    report.check(eventually(healthy, 300), "the executor is healthy again")


def spans_by_service(log: str) -> dict[str, Counter[str]]:
    """How many spans of which name each service sent, numbers in names left out, from the stand-in's log."""
    found: dict[str, Counter[str]] = {}
    service, in_span = "", False
    for line in log.splitlines():
        if line.startswith(("ResourceSpans #", "Span #", "SpanEvent #", "SpanLink #")):
            in_span = line.startswith("Span #")
        elif match := re.match(r"\s+-> service\.name: Str\((.*)\)", line):
            service = match[1]
        elif in_span and (match := re.match(r"\s*Name\s*: (.*)", line)):
            found.setdefault(service, Counter())[re.sub(r"\d+", "N", match[1].strip())] += 1
    return found


def check_traces(report: Report, stack: Stack, real_jaeger: bool, client: Client) -> None:
    if not real_jaeger:

        def arrived() -> bool:
            return len(spans_by_service(docker("logs", stack.container("jaeger")))) == 2

        report.check(eventually(arrived, 30), "spans of both services arrive at the receiver")
        for service, names in spans_by_service(docker("logs", stack.container("jaeger"))).items():
            kinds = ", ".join(f"{name} ({count})" for name, count in names.most_common(12))
            report.say(f"     {service}: {names.total()} spans: {kinds}")
    stack.compose("stop", "-t", "2", "jaeger")
    answer = client.complete(PROMPT, max_tokens=8, temperature=0.0, deadline=600)
    report.check(answer.usage.completion_tokens == 8, "with jaeger stopped requests are answered as before")


def check_drain(report: Report, stack: Stack, client: Client) -> None:
    stopping: list[threading.Thread] = []

    def stop() -> None:
        stopping.append(threading.Thread(target=stack.compose, args=("stop", "scheduler")))
        stopping[0].start()

    try:
        tokens, last, _ = tokens_of(client, DRAINED, 4, stop)
        whole = isinstance(last, Finished) and len(tokens) == DRAINED
        report.check(
            whole, "scheduler stopped in the middle of a request: the request ends whole", f"{len(tokens)} tokens"
        )
    except StepwireError as error:
        report.check(False, "scheduler stopped in the middle of a request: the request ends whole", error)
    for thread in stopping:
        thread.join()
    stack.compose("stop", "executor")
    for service in ("scheduler", "executor"):
        code = stack.inspect(service)["State"]["ExitCode"]
        report.check(code == 0, f"{service} ends by itself, within its grace period", f"exit code {code}")


def check_given_model(report: Report, files: list[Path]) -> None:
    """Any file will do: here only the copying is looked at."""
    file = ROOT / "LICENSE"
    given = Stack(files, {"MODEL_FILE": str(file)})
    given.compose("run", "--rm", "model")
    copied = given.compose("run", "--rm", "--no-deps", "--entrypoint", "sha256sum", "scheduler", "/models/given")
    same = hashlib.sha256(file.read_bytes()).hexdigest() in copied
    report.check(same, "MODEL_FILE: a local file is copied into the volume")


def verify(report: Report) -> None:
    versions(report)
    check_gpu_file(report)
    ports = {"API_PORT": str(free_port()), "JAEGER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder, local_torch(report), jaeger(report) as real_jaeger:
        override = Path(folder) / "override.yml"
        override.write_text(OVERRIDE)
        files = [ROOT / "docker-compose.yml", override]
        stack = Stack(files, ports)
        stack.compose("down", "-v", "--remove-orphans")
        try:
            with contextlib.closing(Events(stack.project)) as events:
                began = time.monotonic()
                stack.compose("up", "--build", "-d", timeout_s=3000)
                report.say(f"docker compose up --build -d: {time.monotonic() - began:.0f} s")
                up = eventually(lambda: stack.inspect("scheduler")["State"]["Health"]["Status"] == "healthy", 120)
                time.sleep(1)  # for the engine's events to come through
                check_order(report, events.read())
            sizes = docker("images", "--format", "{{.Repository}} {{.Size}}").splitlines()
            report.say("     " + ", ".join(sorted({line for line in sizes if line.startswith("stepwire-")})))
            check_confinement(report, stack)
            check_kernels(report, stack)
            if up:
                with Client(f"127.0.0.1:{ports['API_PORT']}") as client:
                    check_serving(report, stack, client)
                    check_traces(report, stack, real_jaeger, client)
                    check_drain(report, stack, client)
                check_given_model(report, files)
        except (CommandFailed, StepwireError, KeyError) as error:
            report.check(False, "the stack can be brought up and asked", error)
        finally:
            if report.failed:
                for service in ("model", "executor", "scheduler"):
                    with contextlib.suppress(CommandFailed):
                        print(stack.compose("logs", "--no-color", "--tail", "40", service), file=sys.stderr)
            stack.compose("down", "-v", "--remove-orphans")


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy/verify-compose")
    parser.add_argument("--record", type=Path, help="also write the report to this file")
    parser.add_argument(
        "--cuda-image", action="store_true", help="instead: the image for a GPU, built and run on the CPU"
    )
    arguments = parser.parse_args()
    record: Path | None = arguments.record
    report = Report()
    if arguments.cuda_image:
        verify_cuda_image(report)
    else:
        verify(report)
    report.say(f"{sum(line.startswith('ok') for line in report.lines)} passed, {report.failed} failed")
    if record is not None:
        record.write_text("\n".join(report.lines) + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
