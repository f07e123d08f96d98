"""A load in several client processes against a running service, and what came of it."""

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.gpu_client import spread

CONNECTIONS: Final = 4  # of each process
READY_S: Final = 60.0

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """`requests` of `prompt` tokens in and `output` tokens out, `at_once` of them at any time."""

    requests: int
    at_once: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Share:
    """What one process does of it. `vocab`: prompts are of ids below."""

    address: str
    connections: int
    requests: int
    at_once: int
    prompt: int
    output: int
    vocab: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Wall: from the first request sent to the last token. `client_cpu_share`: of the busiest process, of one CPU."""

    output_tokens_per_s: float
    ms_per_token: float  # of the wall, for each token of one stream
    wall_s: float
    ttft_ms: dict[str, float]
    gap_ms: dict[str, float]
    client_cpu_share: float


class Clients:
    """Load processes, kept from one load to the next, no two of which have a prompt in common: the prefix cache finds
    nothing. A context manager: they end with it."""

    def __init__(self, count: int) -> None:
        self._loads = itertools.count(1)
        self._stack = contextlib.ExitStack()
        self._place = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._processes = [self._stack.enter_context(_client(self._out(part))) for part in range(count)]

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, targets: Sequence[str], load: Load, *, vocab: int, limit_s: float) -> Outcome:
        """Spreads the load evenly over the processes, those over `targets`. Raises RuntimeError: a process failed,
        tokens are missing, or `limit_s` is over."""
        seed = next(self._loads) * 1000
        count = max(1, min(len(self._processes), load.at_once))
        processes = self._processes[:count]
        parts = zip(processes, spread(load.requests, count), spread(load.at_once, count), strict=True)
        for part, (process, requests, at_once) in enumerate(parts):
            share = Share(
                targets[part % len(targets)], CONNECTIONS, requests, at_once, load.prompt, load.output, vocab,
                seed + part,
            )  # fmt: skip
            _say(process, json.dumps(asdict(share)))
        for process in processes:
            _hear(process, READY_S)
        for process in processes:
            _say(process, "go")
        shares = [json.loads(_hear(process, limit_s))["cpu_share"] for process in processes]
        found = [np.load(self._out(part)) for part in range(count)]
        return summarise([(own["sent"], own["arrivals"]) for own in found], load, max(shares))

    def _out(self, part: int) -> Path:
        return self._place / f"{part}.npz"


@contextlib.contextmanager
def _client(out: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "bench.gpu_client", str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _say(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: "subprocess.Popen[str]", limit_s: float) -> str:
    """The next line of the process; one that has nothing to say in time is killed."""
    killer = threading.Timer(limit_s, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        killer.cancel()
    if not line:
        raise RuntimeError(f"a load process ended ({process.wait()}) or was silent for {limit_s:.0f} s")
    return line


def summarise(parts: Sequence[tuple[I64, I64]], load: Load, cpu_share: float) -> Outcome:
    """parts: (sent, arrivals) of each process. Raises RuntimeError where a stream lacks tokens."""
    first_ns = min(int(sent[:, 1].min()) for sent, _ in parts if len(sent))
    last_ns = max(int(arrivals[:, 1].max()) for _, arrivals in parts if len(arrivals))
    waits, gaps, tokens = [], [], 0
    for sent, arrivals in parts:
        order = np.argsort(arrivals[:, 0], kind="stable")
        streams, counts = np.unique(arrivals[order, 0], return_counts=True)
        if len(streams) != len(sent) or (counts != load.output).any():
            raise RuntimeError(f"{len(sent)} streams of {load.output} tokens were asked for; got {counts.tolist()}")
        times = arrivals[order, 1].reshape(-1, load.output)
        sent_ns = sent[np.argsort(sent[:, 0], kind="stable"), 1]
        waits.append(times[:, 0] - sent_ns)
        gaps.append(np.diff(times, axis=1).ravel())
        tokens += len(arrivals)
    if tokens != load.requests * load.output:
        raise RuntimeError(f"{tokens} tokens came where {load.requests * load.output} were asked for")
    wall_s = (last_ns - first_ns) / 1e9
    return Outcome(
        output_tokens_per_s=round(tokens / wall_s, 1),
        ms_per_token=round(wall_s * 1e3 / (load.output * load.requests / load.at_once), 4),
        wall_s=round(wall_s, 4),
        ttft_ms=percentiles(np.concatenate(waits) / 1e6),
        gap_ms=percentiles(np.concatenate(gaps) / 1e6),
        client_cpu_share=cpu_share,
    )


def percentiles(values: "NDArray[Any]") -> dict[str, float]:
    """p50, p95, p99; empty of nothing."""
    if not len(values):
        return {}
    found = np.percentile(values, (50, 95, 99))
    return {f"p{p}": round(float(value), 4) for p, value in zip((50, 95, 99), found, strict=True)}
