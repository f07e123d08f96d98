"""Steps of bench.executor made by hand, each kind by itself, one in flight at a time.

decode-N or decode-N-L, N rows of L tokens each (128) decode one token; prefill-N, a prompt of N tokens is computed;
mixed-D-N, D rows decode beside N tokens of a prompt, from its token 1024 on; serve-D-N-L, D rows of L tokens decode
beside a whole prompt of N tokens.
"""

import re
import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from bench.plans import greedy
from bench.step_batch import Lengths
from bench.step_work import StepSize, Work, rates
from common.messages import U32, Admit, Hello, StepPlan, StepResult, u32
from executor_svc.kernels_cpu.decoder import NativeDecoder
from executor_svc.runner import Runner

CASES: Final = ("decode-1", "decode-8", "decode-32", "prefill-128", "prefill-512", "mixed-8-152")
CONTEXT: Final = 128
_CASE: Final = re.compile(r"(decode-N(-N)?|prefill-N|mixed-N-N|serve-N-N-N)".replace("N", "[1-9][0-9]*"))
STEPS: Final = 16  # of one turn
MIXED_START: Final = 1024  # what the prompt of a mixed step has behind it
MIXED_STEPS: Final = 8
OUTPUT: Final = 4096


@dataclass
class Samples:
    """Of one executor and case. Nanoseconds but for `works` and `ticks`."""

    step: list[int] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    prepare: list[int] = field(default_factory=list)
    ticks: dict[str, int] = field(default_factory=dict)

    def add(self, result: StepResult, ns: int, work: Work) -> None:
        timings = result.timings
        self.step.append(ns)
        self.works.append(work)
        self.device.append(timings.device_end_ns - timings.device_start_ns)
        self.prepare.append(timings.launched_ns - timings.prepare_start_ns)


class Turns:
    """Plans by hand for one executor, which is drained between two turns."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._block_size = runner.info.block_size
        self._size = StepSize.of(runner.model, runner.cache.shape)
        self._epoch = self._next_step = self._admissions = 0
        self._lengths = Lengths(runner.info.num_rows)

    def run(self, case: str, samples: Samples) -> None:
        """One turn: some steps of `case`, in an epoch of their own."""
        kind, sizes = sizes_of(case)
        count = sizes[0]
        self._epoch, self._next_step = self._epoch + 1, 1
        self._runner.begin_epoch(Hello(b"by hand".ljust(16), self._epoch, 1, 0, 0))
        self._take_ticks({})
        if kind == "mixed":
            self._mixed(count, sizes[1], samples)
        elif kind == "serve":
            self._serve(count, sizes[1], sizes[2], samples)
        elif kind == "decode":
            self._begin_decoding(count, sizes[1] if len(sizes) > 1 else CONTEXT)
            for _ in range(STEPS):
                self._step(samples, decode_rows=u32(range(count)), num_tokens=count)
        else:
            for _ in range(max(1, STEPS * 64 // count)):
                release = u32([0]) if self._next_step > 1 else u32([])
                admit = (self._admit(0, count, count // self._block_size + 1),)
                self._step(samples, release=release, admit=admit, num_tokens=count, **piece_of(0, 0, count))
        self._take_ticks(samples.ticks)

    def _mixed(self, decodes: int, chunk: int, samples: Samples) -> None:
        self._begin_decoding(decodes, CONTEXT)
        row, total = decodes, MIXED_START + MIXED_STEPS * chunk
        admit = replace(self._admit(row, total, 1), blocks=self._behind(decodes, CONTEXT, total))
        self._step(None, admit=(admit,), **piece_of(row, 0, 512), num_tokens=512)
        self._step(None, num_tokens=MIXED_START - 512, **piece_of(row, 512, MIXED_START - 512))
        self._take_ticks({})
        for start in range(MIXED_START, total, chunk):
            work = piece_of(row, start, chunk)
            self._step(samples, decode_rows=u32(range(decodes)), num_tokens=decodes + chunk, **work)

    def _serve(self, decodes: int, prompt: int, context: int, samples: Samples) -> None:
        self._begin_decoding(decodes, context)
        table, release = self._behind(decodes, context, prompt), u32([])
        for _ in range(STEPS):
            admit = (replace(self._admit(decodes, prompt, 1), blocks=table),)
            work = {"num_tokens": decodes + prompt, **piece_of(decodes, 0, prompt)}
            self._step(samples, release=release, admit=admit, decode_rows=u32(range(decodes)), **work)
            release = u32([decodes])

    def _begin_decoding(self, count: int, context: int) -> None:
        """Rows 0 to count - 1 have their context."""
        for row in range(count):
            admit = self._admit(row, context, self._blocks_of(context))
            self._step(None, admit=(admit,), num_tokens=context, **piece_of(row, 0, context))
        self._take_ticks({})

    def _blocks_of(self, context: int) -> int:
        return (context + STEPS) // self._block_size + 1

    def _behind(self, rows: int, context: int, tokens: int) -> U32:
        """Blocks for so many tokens, behind those of rows of `context`."""
        first = rows * self._blocks_of(context)
        return u32(range(first, first + tokens // self._block_size + 1))

    def _admit(self, row: int, tokens: int, blocks: int) -> Admit:
        self._admissions += 1
        ids = np.random.default_rng(self._admissions).integers(1, self._runner.info.vocab_size, tokens)
        table = u32(range(row * blocks, (row + 1) * blocks))
        return Admit(row, self._admissions, ids.astype(np.uint32), tokens, tokens, 0, table, greedy(OUTPUT))

    def _step(self, samples: Samples | None, **fields: Any) -> None:
        """From the plan's arrival until its result is there."""
        plan = StepPlan(self._epoch, self._next_step, 0, **fields)
        self._next_step += 1
        work = self._size.work(self._lengths.batch(plan))
        start = time.perf_counter_ns()
        result = self._runner.execute(plan, time.monotonic_ns()).wait()
        ns = time.perf_counter_ns() - start
        if samples is not None:
            samples.add(result, ns, work)

    def _take_ticks(self, into: dict[str, int]) -> None:
        if isinstance(self._runner.model, NativeDecoder):
            for part, ticks in self._runner.model.spent().items():
                into[part] = into.get(part, 0) + ticks


def sizes_of(case: str) -> tuple[str, list[int]]:
    """Its kind and numbers. Raises ValueError for what is no case."""
    if not _CASE.fullmatch(case):
        raise ValueError(case)
    kind, *sizes = case.split("-")
    return kind, [int(size) for size in sizes]


def piece_of(row: int, start: int, count: int) -> dict[str, Any]:
    return {"prefill_rows": u32([row]), "prefill_starts": u32([start]), "prefill_counts": u32([count])}


def summarise(samples: Samples, ticks_per_ns: float) -> dict[str, Any]:
    device, prepare = float(np.median(samples.device)) / 1e6, float(np.median(samples.prepare)) / 1e6
    parts = {part: ticks / ticks_per_ns / len(samples.step) / 1e6 for part, ticks in samples.ticks.items()}
    if parts:
        parts["other device work"] = float(np.mean(samples.device)) / 1e6 - sum(parts.values())
    return {
        **rates(samples.step, samples.works),
        "device_ms": round(device, 2),
        "prepare_ms": round(prepare, 2),
        "host_ms": round(float(np.median(samples.step)) / 1e6 - device, 2),
        "parts_mean_ms": {part: round(value, 2) for part, value in parts.items()},
    }
