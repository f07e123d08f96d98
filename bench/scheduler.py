"""What a step costs the scheduler: result bytes -> StepResult -> update() -> schedule() -> plan bytes, nothing else.

    python -m bench.scheduler                     all cases
    python -m bench.scheduler --rows 256 --json   last line is one object: conditions, results
    python -m bench.scheduler --vllm ENV/bin/python --steps 1000       beside the schedulers of vLLM 0.32, in turns

The real core and the real wire codec, called as the executor driver calls them, with a heap in huge pages where the
service has one, and a modelled executor whose work is outside the measured time. So is what the core does between two
steps: prompts are hashed when they come, and once a plan is sent `look_ahead` does early what the next one will need.
All rows of a case are admitted in one step, with prompts of one length but where said otherwise, so that all cross
their block boundaries together. Cases:

    steady    nobody comes or goes
    spread    the same with prompts of 16 lengths: in every step one row in 16 needs a block
    churn     who finishes, by length, is replaced by a fresh request
    eos       the same with answers that end by EOS, unforeseen: then a step in flight has computed one token too many
    queued    churn with 100,000 requests waiting

Cases of one size run interleaved, 50 steps each in turn, so that a disturbance of the machine hits all of them.
"""

import argparse
import json
import os
import platform
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.modelled_executor import VOCAB, ModelledExecutor, modelled_info
from bench.scheduler_peer import (
    FROM_ANOTHER_RUN,
    IN_TURNS,
    MAX_QUEUED,
    VllmSchedulers,
    beside,
    missing,
    recorded,
    recorded_table,
    steps_in_turns,
    table,
)
from bench.serving import commit
from common import wire
from common.messages import Sampling, StepResult, u32
from scheduler_svc.app import quieten_collector
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.huge_heap import exec_with_huge_heap
from scheduler_svc.messages import Submit
from stepwire.executor.v1 import executor_pb2 as pb

PARTS = ("decode", "update", "schedule", "encode")
SIZES = (32, 256, 1024)
DEPTH = 2
BLOCK_SIZE = 16
PROMPT = 64
MEAN_OUTPUT = 256
QUEUED = 100_000
TURN = 50
UNCOUNTED = 3  # first steps of a turn after another process had the caches


@dataclass
class Samples:
    """One entry per measured step; `parts_ns` by PARTS. ahead_ns: of `look_ahead`, in no sum."""

    parts_ns: list[tuple[int, int, int, int]] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=list)
    ahead_ns: list[int] = field(default_factory=list)
    plan_bytes: list[int] = field(default_factory=list)


class Case:
    """One scheduler with its modelled executor, kept full."""

    def __init__(
        self,
        num_rows: int,
        steps: int,
        seed: int,
        *,
        churn: bool = False,
        eos: bool = False,
        spread: bool = False,
        queued: int = 0,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_rows, self._churn, self._spread = num_rows, churn, spread
        self._output = 2 * MEAN_OUTPUT if churn or eos else steps * (TURN + UNCOUNTED) // TURN + 4 * TURN
        max_context = (-(-(PROMPT + self._output) // BLOCK_SIZE) + 2) * BLOCK_SIZE
        num_blocks = (num_rows + 64) * max_context // BLOCK_SIZE
        self._executor = ModelledExecutor(
            modelled_info(num_rows, BLOCK_SIZE, num_blocks, max_context, num_rows * 2 * PROMPT),
            DEPTH,
            seed,
            eos_chance=1 / MEAN_OUTPUT if eos else 0.0,
        )
        self._core = Scheduler(CoreConfig(pipeline_depth=DEPTH, max_queued_requests=2 * (queued + num_rows)))
        self._core.add_executor("modelled:0")
        self._core.executor_up(0, self._core.begin_epoch(0).epoch, self._executor.welcome, 0)
        self._results: deque[bytes] = deque()
        self._submitted = 0
        self.samples = Samples()
        for _ in range(num_rows + queued):
            self._submit()
        while self._core.num_running < num_rows or self._core.executors[0].prefilling:
            self._send() if len(self._results) < DEPTH else self._step()
        while len(self._results) < DEPTH:
            self._send()
        self.samples = Samples()

    def _submit(self) -> None:
        """Of the first ones, with churn, most are part done: else they would end together too."""
        self._submitted += 1
        output = self._output
        prompt = PROMPT + self._submitted % BLOCK_SIZE if self._spread else PROMPT
        if self._churn:
            shortest = 1 if self._submitted <= self._num_rows else MEAN_OUTPUT // 2
            output = int(self._rng.integers(shortest, 2 * MEAN_OUTPUT - shortest + 1))
        request = Submit(
            key=self._submitted,
            request_id=f"request-{self._submitted}",
            prompt=u32(self._rng.integers(1000, VOCAB - 1000, size=prompt, dtype=np.uint32)),
            sampling=Sampling(seed=self._submitted, max_tokens=output),
            arrival_ns=0,
        )
        self._core.submit(request, 0)

    def _send(self) -> None:
        record = self._core.schedule(0, perf_counter_ns())
        assert record is not None
        self._answer(wire.encode_to_executor(record.plan).SerializeToString())

    def _answer(self, plan: bytes) -> None:
        self._results.append(self._executor.answer(plan, self._num_rows))

    def _step(self) -> None:
        """Measured: one result taken, the next plan made. Then, unmeasured, it is answered and who left is replaced."""
        data = self._results.popleft()
        core = self._core
        cpu = thread_time_ns()
        start = perf_counter_ns()
        result = wire.decode_from_executor(pb.FromExecutor.FromString(data))
        decoded = perf_counter_ns()
        assert isinstance(result, StepResult)
        outcome = core.update(0, result, decoded)
        updated = perf_counter_ns()
        record = core.schedule(0, updated) if core.can_schedule(0) else None
        scheduled = perf_counter_ns()
        assert record is not None
        plan = wire.encode_to_executor(record.plan).SerializeToString()
        encoded = perf_counter_ns()
        cpu = thread_time_ns() - cpu
        self.samples.parts_ns.append((decoded - start, updated - decoded, scheduled - updated, encoded - scheduled))
        self.samples.cpu_ns.append(cpu)
        self.samples.plan_bytes.append(len(plan))
        self._answer(plan)
        start = perf_counter_ns()
        core.look_ahead(0)
        self.samples.ahead_ns.append(perf_counter_ns() - start)
        for _ in outcome.endings:
            self._submit()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def settle(self) -> None:
        counted, self.samples = self.samples, Samples()
        self.run(UNCOUNTED)
        self.samples = counted


def percentiles(values: NDArray[np.int64], scale: float = 1e-3) -> tuple[float, float]:
    p50, p99 = np.percentile(values, (50, 99))
    return round(float(p50) * scale, 1), round(float(p99) * scale, 1)


def summarise(samples: Samples) -> dict[str, object]:
    """Times in µs. `p50_us` and `p99_us` are of the sum of all parts, wall clock; `cpu_*` of the thread's CPU time.
    `look_ahead` comes between two steps and is no part."""
    parts = np.array(samples.parts_ns)
    p50, p99 = percentiles(parts.sum(axis=1))
    cpu50, cpu99 = percentiles(np.array(samples.cpu_ns))
    ahead50, ahead99 = percentiles(np.array(samples.ahead_ns))
    bytes50, bytes99 = percentiles(np.array(samples.plan_bytes), 1)
    by_part = {part: percentiles(parts[:, i]) for i, part in enumerate(PARTS)}
    return {
        "p50_us": p50,
        "p99_us": p99,
        "cpu_p50_us": cpu50,
        "cpu_p99_us": cpu99,
        "min_us": round(float(parts.sum(axis=1).min()) / 1e3, 1),
        "parts": {part: {"p50_us": a, "p99_us": b} for part, (a, b) in by_part.items()},
        "look_ahead": {"p50_us": ahead50, "p99_us": ahead99},
        "plan_bytes": {"p50": bytes50, "p99": bytes99, "max": max(samples.plan_bytes)},
        "steps": len(samples.parts_ns),
    }


def measure(
    num_rows: int, steps: int, seed: int, queued: int, peer: VllmSchedulers | None = None
) -> dict[str, dict[str, object]]:
    """By case. The collector is as the service has it. `peer` is measured in turns with ours."""
    quieten_collector()
    cases = {
        "steady": Case(num_rows, steps, seed),
        "spread": Case(num_rows, steps, seed, spread=True),
        "churn": Case(num_rows, steps, seed, churn=True),
        "eos": Case(num_rows, steps, seed, eos=True),
        "queued": Case(num_rows, steps, seed, churn=True, queued=queued),
    }
    for case in cases.values():
        case.run(2 * TURN)
        case.samples = Samples()
    for _ in range(0, steps, TURN):
        for case in cases.values():
            if peer:
                case.settle()
            case.run(TURN)
        if peer:
            peer.run_turn()
    return {name: summarise(case.samples) for name, case in cases.items()}


def measure_beside(
    vllm: str, num_rows: int, steps: int, seed: int, queued: int
) -> tuple[dict[str, dict[str, object]], dict[str, Any]]:
    """Ours by case, and what the script of vLLM's schedulers reports."""
    turns = -(-steps // TURN)
    turn = steps_in_turns(num_rows, steps, turns)
    options = {"rows": num_rows, "steps": turns * (turn + UNCOUNTED), "warm-up": 2 * TURN, "seed": seed}
    options |= {"prompt": PROMPT, "mean-output": MEAN_OUTPUT, "block-size": BLOCK_SIZE}
    options |= {"queued": min(queued, MAX_QUEUED), "uncounted": UNCOUNTED}
    with VllmSchedulers(vllm, options, turn) as peer:
        return measure(num_rows, steps, seed, queued, peer), peer.report()


def show(num_rows: int, queued: int, found: dict[str, dict[str, object]]) -> None:
    print(f"\n{num_rows} decoding rows, µs as p50 / p99")
    heads = ("sum", "thread CPU", *PARTS, "(look ahead)", "plan bytes")
    print(f"{'':8}" + "".join(f"{head:>16}" for head in heads))
    for name, r in found.items():
        cells = [f"{r['p50_us']} / {r['p99_us']}", f"{r['cpu_p50_us']} / {r['cpu_p99_us']}"]
        times = [*r["parts"].values(), r["look_ahead"]]  # type: ignore[attr-defined]
        cells += [f"{p['p50_us']} / {p['p99_us']}" for p in times]
        size = r["plan_bytes"]
        cells.append(f"{size['p50']:.0f} / {size['p99']:.0f}")  # type: ignore[index]
        print(f"{name:8}" + "".join(f"{cell:>16}" for cell in cells))
    growth = float(str(found["queued"]["p50_us"])) / float(str(found["churn"]["p50_us"]))
    print(f"with {queued} requests waiting: {growth:.2f} times the p50 without")


def conditions(steps: int, queued: int) -> dict[str, object]:
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    load = Path("/proc/loadavg")
    return {
        "cpu": cpu,
        "load_average": load.read_text().split()[0] if load.exists() else "unknown",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "protobuf": version("protobuf"),
        "pipeline_depth": DEPTH,
        "block_size": BLOCK_SIZE,
        "prompt": PROMPT,
        "mean_output_with_churn": MEAN_OUTPUT,
        "queued": queued,
        "steps": steps,
        "vocabulary": VOCAB,
        "allocator": f"{os.environ.get('PYTHONMALLOC', 'default')} {os.environ.get('GLIBC_TUNABLES', '')}".strip(),
        "commit": commit(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=SIZES, help="decoding rows")
    parser.add_argument("--steps", type=int, default=2000, help="measured steps of each case")
    parser.add_argument("--queued", type=int, default=QUEUED, help="requests that wait in the case `queued`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", default="", help="the Python of an environment with vLLM: measured in the same run")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    args = parser.parse_args(argv)
    if args.vllm and (why := missing(args.vllm)):
        parser.error(why)
    said = conditions(args.steps, args.queued) | {"peers": FROM_ANOTHER_RUN}
    results: dict[str, object] = {}
    peers: dict[str, dict[str, object]] = {} if args.vllm else recorded()
    for num_rows in args.rows:
        if args.vllm:
            found, report = measure_beside(args.vllm, num_rows, args.steps, args.seed, args.queued)
            said["peers"] = {"measured": IN_TURNS} | report["conditions"]
            theirs = beside(found, report)
            for name, numbers in theirs.items():
                peers.setdefault(name, {})[str(num_rows)] = numbers
            told = table(theirs)
        else:
            found = measure(num_rows, args.steps, args.seed, args.queued)
            told = recorded_table(num_rows)
        if not args.json:
            show(num_rows, args.queued, found)
            print(told)
        results[str(num_rows)] = {**found.pop("steady"), **found}
    print(json.dumps({"conditions": said, "results": results, "peers": peers}))
    return 0


if __name__ == "__main__":
    exec_with_huge_heap()
    sys.exit(main())
