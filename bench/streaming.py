"""What streaming costs: CPU per token in the core process and in all of the service, and how late tokens come.

    python -m bench.streaming                    256 and 1024 streams; --api-workers 0, 1 and 2
    python -m bench.streaming --streams 1024 --workers 2 --json       last line is one object: conditions, results

A real scheduler with its workers, over real connections, around an executor whose steps take a fixed time, such that
all streams together get --rate tokens a second: every step brings one token to each stream, all at once. Text is
detokenised. CPU is that of the processes between two moments in which all streams run; a token's delay runs from the
moment its step's result was made in the executor to its arrival in the client. A handler that only writes bytes to as
many streams is measured beside it: what grpc alone costs, on this machine, now.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import psutil

from bench.serving import commit
from bench.streaming_executor import WRAP_NS

START_S: Final = 60.0
CHANNELS: Final = 8  # connections to each worker


@dataclass(frozen=True)
class Case:
    """`rate`: tokens a second of all streams together."""

    workers: int
    streams: int
    rate: float
    seconds: float

    @property
    def step_ns(self) -> int:
        return int(self.streams / self.rate * 1e9)

    @property
    def max_tokens(self) -> int:
        """Enough for the wait before the window, the window, and two steps after it."""
        return int((self.seconds + 3.0) / (self.step_ns / 1e9)) + 3


@dataclass(frozen=True)
class Outcome:
    """CPU in microseconds for each streamed token. `client_cpu_share`: of the busiest client, of one CPU."""

    tokens_per_s: float
    core_us_per_token: float
    workers_us_per_token: list[float]
    service_us_per_token: float
    delay_p50_ms: float
    delay_p99_ms: float
    worst_stream_p99_ms: float
    client_cpu_share: float


@contextlib.contextmanager
def child(*args: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-P", "-m", *args], stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def address(file: Path, process: subprocess.Popen[bytes], log: Path) -> list[str]:
    """What a service wrote once it listened."""
    limit_s = time.monotonic() + START_S
    while not file.exists():
        if process.poll() is not None or time.monotonic() > limit_s:
            raise RuntimeError(f"a service did not start:\n{log.read_text()}")
        time.sleep(0.02)
    return file.read_text().split()


def cpu_s(process: psutil.Process) -> float:
    """Of all threads that live, from schedstat: other times of the kernel are in ticks of 10 ms: too coarse here."""
    total_ns = 0
    for thread in process.threads():
        with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
            total_ns += int(Path(f"/proc/{process.pid}/task/{thread.id}/schedstat").read_text().split()[0])
    return total_ns / 1e9


def wait_running(target: str, streams: int) -> None:
    """Until all streams decode."""
    from stepwire.v1 import admin_pb2, admin_pb2_grpc

    limit_s = time.monotonic() + START_S
    with grpc.insecure_channel(target) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        while (stats := stub.GetStats(admin_pb2.GetStatsRequest())).running < streams or not stats.generated_tokens:
            if time.monotonic() > limit_s:
                raise RuntimeError(f"{stats.running} of {streams} streams run")
            time.sleep(0.1)


def wait_ready(targets: Sequence[str]) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    for target in targets:
        with grpc.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            limit_s = time.monotonic() + START_S
            while stub.Check(health_pb2.HealthCheckRequest()).status != health_pb2.HealthCheckResponse.SERVING:
                if time.monotonic() > limit_s:
                    raise RuntimeError(f"{target} is not ready")
                time.sleep(0.05)


class Place:
    """A directory with processes that end with it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.path = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def start(self, tag: str, module: str, *args: object) -> tuple[subprocess.Popen[bytes], Path]:
        """The process and its log."""
        log = self.path / f"{tag}.log"
        return self._stack.enter_context(child(module, *map(str, args), log=log)), log


def run_case(case: Case, clients: int) -> Outcome:
    """One scheduler, one executor and `clients` load processes (for each worker, if there are more of these)."""
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        executor_file, api_file = place.path / "executor", place.path / "api"
        service = "bench.streaming_service"
        executor, log = place.start("executor", service, "executor", case.streams, case.step_ns, executor_file)
        (executor_address,) = address(executor_file, executor, log)
        scheduler, log = place.start(
            "scheduler", service, "scheduler", "--listen", "127.0.0.1:0", "--executors", executor_address,
            "--address-file", api_file, "--api-workers", case.workers,
            "--max-queued-requests", 2 * case.streams, "--drain-s", 0,
        )  # fmt: skip
        shared, *own = address(api_file, scheduler, log)
        targets = own or [shared]
        wait_ready(targets)
        core = psutil.Process(scheduler.pid)
        processes = [core, *core.children()]
        return measure(case, place, targets, processes, clients, lambda: wait_running(targets[0], case.streams))


def run_bare(case: Case, clients: int) -> Outcome:
    """The same load on a handler that does nothing but write."""
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        file = place.path / "bare"
        server, log = place.start("bare", "bench.streaming_bare", case.streams, case.step_ns, case.max_tokens, file)
        targets = address(file, server, log)
        going = place.path / "running"
        return measure(case, place, targets, [psutil.Process(server.pid)], clients, lambda: address(going, server, log))


def measure(
    case: Case,
    place: Place,
    targets: Sequence[str],
    processes: Sequence[psutil.Process],
    clients: int,
    wait: Callable[[], object],
) -> Outcome:
    """Loads `targets` evenly; `wait` returns once all streams run. `processes`: the core, then its workers."""
    per_target = max(1, clients // len(targets))
    parts = len(targets) * per_target
    loads = []
    for part in range(parts):
        streams = case.streams // parts + (part < case.streams % parts)
        loads.append(
            place.start(
                f"client-{part}", "bench.streaming_client", targets[part % len(targets)], CHANNELS // per_target,
                streams, case.max_tokens, part << 20, place.path / f"{part}.npy",
            )
        )  # fmt: skip
    wait()
    time.sleep(1.0)
    start_ns, before = time.monotonic_ns(), [cpu_s(p) for p in processes]
    time.sleep(case.seconds)
    end_ns, after = time.monotonic_ns(), [cpu_s(p) for p in processes]
    shares = []
    for load, log in loads:
        if load.wait(START_S) != 0:
            raise RuntimeError(log.read_text())
        shares.append(json.loads(log.read_text().splitlines()[-1])["cpu_share"])
    rows = [np.load(place.path / f"{part}.npy") for part in range(parts)]
    return summarise(rows, start_ns, end_ns, [b - a for a, b in zip(before, after, strict=True)], max(shares))


def summarise(
    rows: Sequence["np.typing.NDArray[np.int64]"], start_ns: int, end_ns: int, cpu: Sequence[float], share: float
) -> Outcome:
    delays = []
    worst = 0.0
    for part in rows:
        inside = part[(part[:, 1] >= start_ns) & (part[:, 1] < end_ns)]
        delays.append(inside[:, 2])
        order = np.argsort(inside[:, 0], kind="stable")
        _, firsts = np.unique(inside[order, 0], return_index=True)
        worst = max(worst, *(float(np.percentile(one, 99)) for one in np.split(inside[order, 2], firsts[1:])))
    joined = np.concatenate(delays) / 1e6
    per_token = [round(seconds / len(joined) * 1e6, 2) for seconds in cpu]
    return Outcome(
        tokens_per_s=round(len(joined) / ((end_ns - start_ns) / 1e9), 1),
        core_us_per_token=per_token[0],
        workers_us_per_token=per_token[1:],
        service_us_per_token=round(sum(per_token), 2),
        delay_p50_ms=round(float(np.percentile(joined, 50)), 2),
        delay_p99_ms=round(float(np.percentile(joined, 99)), 2),
        worst_stream_p99_ms=round(worst / 1e6, 2),
        client_cpu_share=share,
    )


def conditions(args: argparse.Namespace) -> dict[str, object]:
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "grpc": grpc.__version__,
        "cpus": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "rate_tokens_per_s": args.rate,
        "seconds": args.seconds,
        "channels_per_worker": CHANNELS,
        "detokenise": True,
        "executor": f"computes nothing, fixed step time; delays over {WRAP_NS / 1e9:.2f} s wrap",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="values of --api-workers")
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens a second, all streams together")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the window that is measured")
    parser.add_argument("--clients", type=int, default=2, help="load processes")
    parser.add_argument("--json", action="store_true", help="end with one line, a JSON object")
    args = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    for streams in args.streams:
        bare = run_bare(Case(0, streams, args.rate, args.seconds), args.clients).service_us_per_token
        print(f"{streams} streams, a bare grpc handler: {bare} µs a token", flush=True)
        found: dict[str, object] = {"bare_us_per_token": bare}
        for workers in args.workers:
            outcome = run_case(Case(workers, streams, args.rate, args.seconds), args.clients)
            found[str(workers)] = asdict(outcome)
            print(
                f"{streams} streams, {workers} workers: core {outcome.core_us_per_token} µs,"
                f" service {outcome.service_us_per_token} µs a token; delay p50 {outcome.delay_p50_ms},"
                f" p99 {outcome.delay_p99_ms} ms, worst stream's p99 {outcome.worst_stream_p99_ms} ms;"
                f" {outcome.tokens_per_s} tokens/s; clients at {outcome.client_cpu_share} of a CPU",
                flush=True,
            )
        results[str(streams)] = found
    if args.json:
        print(json.dumps({"conditions": conditions(args), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
