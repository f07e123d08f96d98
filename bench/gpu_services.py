"""The services under load: executor, scheduler, api workers, each a process of this machine."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from bench.gpu_executor import Replay
from bench.streaming import Place, address, cpu_s

_LINE: Final = re.compile(r"^(\S+ \S+) executor INFO (.+?)(?:: (\d+) %)?$")
_POLL_S: Final = 0.05


@dataclass(frozen=True)
class Setup:
    """What the numbers hold for. `model`: a directory with a config.json alone. Flags are added to ours and win."""

    model: Path
    device: str
    max_num_seqs: int
    max_context: int
    max_tokens_per_step: int
    max_prefill_chunk: int
    api_workers: int
    executor_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()

    def told(self) -> dict[str, Any]:
        return {name: value if name != "model" else self.model.name for name, value in asdict(self).items()}


@dataclass
class Executor:
    address: str
    process: subprocess.Popen[bytes]
    log: Path
    ready_s: float = 0.0
    alone: list[dict[str, Any]] = field(default_factory=list)

    def startup(self) -> dict[str, float]:
        """Seconds of each activity, from its first line in the log to its last; `ready`: from the process's start."""
        return phases(self.log.read_text()) | {"ready": self.ready_s}

    def facts(self) -> list[str]:
        """What the log tells of memory, kernels, graphs: all its lines until the replays, but progress."""
        found = [m[2] for line in self.log.read_text().splitlines() if (m := _LINE.match(line)) and not m[3]]
        # Paths and ports are nobody's business.
        return [text for text in found if not text.startswith(("loading", "listening"))]


def phases(log: str) -> dict[str, float]:
    """{activity: seconds} of a log of executor_svc.load_progress."""
    begun: dict[str, datetime] = {}
    ended: dict[str, datetime] = {}
    for line in log.splitlines():
        if (m := _LINE.match(line)) and m[3]:
            at = datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S,%f")
            begun.setdefault(m[2], at)
            ended[m[2]] = at
    return {name: round((ended[name] - at).total_seconds(), 3) for name, at in begun.items()}


@contextlib.contextmanager
def executor(setup: Setup, replays: Sequence[Replay], limit_s: float) -> Iterator[Executor]:
    """Built, the replays done, and serving. Raises RuntimeError with its log's end."""
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        start = time.monotonic()
        out = place.path / "alone.json"
        process, log = place.start(
            "executor", "bench.gpu_executor",
            json.dumps({"out": str(out), "replays": [asdict(replay) for replay in replays]}),
            "--model", setup.model, "--load-format", "dummy", "--listen", "127.0.0.1:0", "--device", setup.device,
            "--address-file", place.path / "address", "--max-num-seqs", setup.max_num_seqs,
            "--max-context", setup.max_context, "--max-tokens-per-step", setup.max_tokens_per_step,
            *setup.executor_flags,
        )  # fmt: skip
        (where,) = address(place.path / "address", process, log)
        found = Executor(where, process, log)
        _wait(lambda: out.exists(), process, log, limit_s)
        found.ready_s = round(time.monotonic() - start, 2)
        found.alone = json.loads(out.read_text())
        yield found


@dataclass(frozen=True)
class Scheduler:
    """`targets`: addresses to call, one for each api worker, or the only one where there is none."""

    targets: list[str]
    core: psutil.Process

    def spent(self, of: Executor) -> dict[str, float]:
        """CPU seconds so far: of the core's process, its workers together, and the executor's."""
        workers = sum(cpu_s(worker) for worker in self.core.children())
        return {"core": cpu_s(self.core), "workers": workers, "executor": cpu_s(psutil.Process(of.process.pid))}

    def told(self) -> dict[str, float]:
        """The median of recent pings to the executor, and prompt tokens that were found in the prefix cache: 0."""
        from stepwire.v1 import admin_pb2, admin_pb2_grpc

        with grpc.insecure_channel(self.targets[0]) as channel:
            stats = admin_pb2_grpc.AdminStub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=5.0)
        return {"round_trip_us": stats.executors[0].rtt_ns / 1e3, "cached_tokens": stats.cached_tokens}


@contextlib.contextmanager
def scheduler(setup: Setup, of: Executor, depth: int, limit_s: float) -> Iterator[Scheduler]:
    """Ready. Raises RuntimeError with its log's end."""
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        process, log = place.start(
            "scheduler", "scheduler_svc", "--model", setup.model, "--load-format", "dummy", "--listen", "127.0.0.1:0",
            "--address-file", place.path / "address", "--executors", of.address, "--api-workers", setup.api_workers,
            "--pipeline-depth", depth, "--max-prefill-chunk", setup.max_prefill_chunk, "--drain-s", 1,
            *setup.scheduler_flags,
        )  # fmt: skip
        shared, *own = address(place.path / "address", process, log)
        for target in own or [shared]:
            _wait(lambda target=target: _is_ready(target), process, log, limit_s)
        yield Scheduler(own or [shared], psutil.Process(process.pid))


def _is_ready(target: str) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _wait(done: Any, process: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not done():
        if process.poll() is not None or time.monotonic() > end_s:
            tail = "\n".join(log.read_text().splitlines()[-30:])
            raise RuntimeError(f"not ready after {limit_s:.0f} s, or dead ({process.poll()}):\n{tail}")
        time.sleep(_POLL_S)


def device_memory() -> dict[str, str]:
    """As nvidia-smi tells it, all processes together; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = "name,memory.used,memory.total,clocks.sm,clocks.mem,power.draw,driver_version"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    values = [value.strip() for value in done.stdout.split(",")]
    return dict(zip(query.split(","), values, strict=False)) if done.returncode == 0 else {}
