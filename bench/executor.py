"""What a step costs the executor alone, on the CPU: no scheduler, no wire, plans made by hand.

    python -m bench.executor                              every case, weights as the default has them
    python -m bench.executor --weights auto,dense,torch   several executors beside each other
    python -m bench.executor --case decode-8 --json       last line is one object: conditions, results

Cases: decode-N or decode-N-L, N rows of L tokens each (128) decode one token; prefill-N, a prompt of N tokens is
computed; mixed-D-N, D rows decode beside N tokens of a prompt, from its token 1024 on; serve-D-N-L, D rows of L tokens
decode beside a whole prompt of N tokens. Weights: auto (as the file has them), dense (bfloat16), int8, int4: the CPU
kernels; torch: the same model in torch's own operations.
Executors and cases take turns, so that a disturbance of the machine hits all of them. Start-up is not in the numbers.

Beside them stands what the machine gave in the same minutes, bytes read from memory and bfloat16 products per second,
and each step's share of both (medians). A share over 1 is of weights that stayed in a cache.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch

from bench.machine import Machine
from bench.serving import commit
from common.messages import Admit, Hello, Sampling, StepPlan, StepResult, u32
from common.model_files.catalog import resolve
from executor_svc.build import build_runner, default_dtype, make_device, make_ops
from executor_svc.kernels_cpu.decoder import NativeDecoder
from executor_svc.kernels_cpu.library import load_library
from executor_svc.kernels_cpu.load import load_native
from executor_svc.kernels_cpu.packing import Format
from executor_svc.loader.load import load_model, model_config
from executor_svc.models.decoder import Decoder
from executor_svc.runner import Runner
from executor_svc.step_model import Model

CASES: Final = ("decode-1", "decode-8", "decode-32", "prefill-128", "prefill-512", "mixed-8-152")
FORMATS: Final = {"auto": None, "dense": Format.DENSE, "int8": Format.INT8, "int4": Format.INT4}
CONTEXT: Final = 128
BLOCK_SIZE: Final = 16
STEPS: Final = 16  # of one turn
MIXED_START: Final = 1024  # what the prompt of a mixed step has behind it
MIXED_STEPS: Final = 8
GREEDY: Final = Sampling(seed=1, max_tokens=4096, temperature=0.0, ignore_eos=True)


@dataclass
class Executor:
    """One way to hold the weights, with a runner of its own."""

    weights: str
    model: Model
    runner: Runner
    epoch: int = 0
    next_step: int = 1
    next_admission: int = 1

    def begin(self) -> None:
        self.epoch, self.next_step = self.epoch + 1, 1
        self.runner.begin_epoch(Hello(b"b" * 16, self.epoch, 1, 0, 0))

    def step(self, **fields: Any) -> tuple[StepResult, int]:
        """The result, and ns from the plan's arrival until it was there."""
        plan = StepPlan(self.epoch, self.next_step, 0, **fields)
        self.next_step += 1
        start = time.perf_counter_ns()
        result = self.runner.execute(plan, time.monotonic_ns()).wait()
        return result, time.perf_counter_ns() - start

    def admit(self, row: int, tokens: int, blocks: int) -> Admit:
        self.next_admission += 1
        ids = np.random.default_rng(self.next_admission).integers(1000, self.model.config.vocab_size, tokens)
        table = u32(range(row * blocks, (row + 1) * blocks))
        return Admit(row, self.next_admission, ids.astype(np.uint32), tokens, tokens, 0, table, GREEDY)


@dataclass
class Samples:
    """Of one executor and case. Nanoseconds but for `ticks`."""

    step: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    prepare: list[int] = field(default_factory=list)
    ticks: dict[str, int] = field(default_factory=dict)

    def add(self, result: StepResult, ns: int) -> None:
        timings = result.timings
        self.step.append(ns)
        self.device.append(timings.device_end_ns - timings.device_start_ns)
        self.prepare.append(timings.launched_ns - timings.prepare_start_ns)


def make(weights: str, threads: int) -> Executor:
    files = resolve("", lambda what, done, total: None)
    model: Model
    if weights == "torch":
        device = make_device("cpu", threads=threads)
        ops = make_ops("fast", device.torch_device)
        dtype = default_dtype("fast", "cpu") or torch.float32
        model = load_model(files, dtype=dtype, device=device.torch_device, ops=ops)
    else:
        device = make_device("cpu", threads=1)
        ops = make_ops("fast", device.torch_device)
        model = load_native(files, model_config(files), load_library(), wanted=FORMATS[weights], threads=threads)
    return Executor(weights, model, build_runner(model, ops=ops, device=device, num_blocks=2048))


def weight_bytes(model: Model) -> int:
    """What one step reads of the weights."""
    if isinstance(model, NativeDecoder):
        return model.weights.step_bytes
    assert isinstance(model, Decoder)
    return model.weights.num_bytes


def blocks_of(context: int) -> int:
    return (context + STEPS) // BLOCK_SIZE + 1


def begin_decoding(executor: Executor, count: int, context: int) -> None:
    """Rows 0 to count - 1 have their context."""
    for row in range(count):
        admit = executor.admit(row, context, blocks_of(context))
        executor.step(admit=(admit,), num_tokens=context, **piece_of(row, 0, context))
    take_ticks(executor, {})


def piece_of(row: int, start: int, count: int) -> dict[str, Any]:
    return {"prefill_rows": u32([row]), "prefill_starts": u32([start]), "prefill_counts": u32([count])}


def run_mixed(executor: Executor, decodes: int, chunk: int, samples: Samples) -> None:
    begin_decoding(executor, decodes, CONTEXT)
    row, total = decodes, MIXED_START + MIXED_STEPS * chunk
    first = decodes * blocks_of(CONTEXT)
    table = u32(range(first, first + total // BLOCK_SIZE + 1))
    executor.step(
        admit=(replace(executor.admit(row, total, 1), blocks=table),), **piece_of(row, 0, 512), num_tokens=512
    )
    executor.step(num_tokens=MIXED_START - 512, **piece_of(row, 512, MIXED_START - 512))
    take_ticks(executor, {})
    for start in range(MIXED_START, total, chunk):
        work = piece_of(row, start, chunk)
        samples.add(*executor.step(decode_rows=u32(range(decodes)), num_tokens=decodes + chunk, **work))


def run_served(executor: Executor, decodes: int, prompt: int, context: int, samples: Samples) -> None:
    begin_decoding(executor, decodes, context)
    first = decodes * blocks_of(context)
    table, release = u32(range(first, first + prompt // BLOCK_SIZE + 1)), u32([])
    for _ in range(STEPS):
        admit = (replace(executor.admit(decodes, prompt, 1), blocks=table),)
        work = piece_of(decodes, 0, prompt)
        rows = u32(range(decodes))
        samples.add(*executor.step(release=release, admit=admit, decode_rows=rows, num_tokens=decodes + prompt, **work))
        release = u32([decodes])


def run_turn(executor: Executor, case: str, samples: Samples) -> None:
    kind, *sizes = case.split("-")
    count = int(sizes[0])
    executor.begin()
    take_ticks(executor, {})
    if kind == "mixed":
        run_mixed(executor, count, int(sizes[1]), samples)
    elif kind == "serve":
        run_served(executor, count, int(sizes[1]), int(sizes[2]), samples)
    elif kind == "decode":
        begin_decoding(executor, count, int(sizes[1]) if len(sizes) > 1 else CONTEXT)
        for _ in range(STEPS):
            samples.add(*executor.step(decode_rows=u32(range(count)), num_tokens=count))
    else:
        for _ in range(max(1, STEPS * 64 // count)):
            release = u32([0]) if executor.next_step > 1 else u32([])
            admit = (executor.admit(0, count, count // BLOCK_SIZE + 1),)
            samples.add(*executor.step(release=release, admit=admit, num_tokens=count, **piece_of(0, 0, count)))
    take_ticks(executor, samples.ticks)


def take_ticks(executor: Executor, into: dict[str, int]) -> None:
    if isinstance(executor.model, NativeDecoder):
        for part, ticks in executor.model.spent().items():
            into[part] = into.get(part, 0) + ticks


def summarise(executor: Executor, case: str, samples: Samples, ticks_per_ns: float) -> dict[str, Any]:
    kind, *sizes = case.split("-")
    # What is left is the length of the rows that decode.
    rows, config = sum(int(size) for size in sizes[: {"mixed": 2, "serve": 2}.get(kind, 1)]), executor.model.config
    step = np.percentile(samples.step, (50, 95, 99)) / 1e6
    device, prepare = float(np.median(samples.device)) / 1e6, float(np.median(samples.prepare)) / 1e6
    parts = {part: ticks / ticks_per_ns / len(samples.step) / 1e6 for part, ticks in samples.ticks.items()}
    if parts:
        mean = float(np.mean(samples.device)) / 1e6
        parts["other device work"] = mean - sum(parts.values())
    tokens = {"prefill": 1, "decode": rows, "mixed": int(sizes[0]), "serve": int(sizes[0]) + 1}[kind]  # with logits
    head = config.vocab_size * config.hidden_size
    flops = 2.0 * (rows * (config.num_parameters - head) + tokens * head)
    return {
        **{f"p{p}_ms": round(float(value), 2) for p, value in zip((50, 95, 99), step, strict=True)},
        "tokens_per_s": round(rows / step[0] * 1e3, 1),
        "device_ms": round(device, 2),
        "prepare_ms": round(prepare, 2),
        "host_ms": round(float(step[0]) - device, 2),
        "parts_mean_ms": {part: round(value, 2) for part, value in parts.items()},
        "weights_gb_s": round(weight_bytes(executor.model) / step[0] / 1e6, 1),
        "gflop_s": round(flops / step[0] / 1e6, 1),
        "steps": len(samples.step),
    }


def measure(executors: Sequence[Executor], cases: Sequence[str], seconds: float) -> tuple[dict[str, Any], Machine]:
    """Turns over all executors and cases until the time is up; the first turn warms up and does not count."""
    machine = Machine()
    samples = {(e.weights, case): Samples() for e in executors for case in cases}
    end = time.perf_counter() + seconds
    begin_ns, begin_ticks, turns = time.monotonic_ns(), _ticks(), 0
    while turns < 2 or time.perf_counter() < end:
        machine.measure()
        for case in cases:
            for executor in executors:
                run_turn(executor, case, samples[executor.weights, case] if turns else Samples())
        turns += 1
    per_ns = (_ticks() - begin_ticks) / (time.monotonic_ns() - begin_ns)
    found = {
        case: {e.weights: summarise(e, case, samples[e.weights, case], per_ns) for e in executors} for case in cases
    }
    limits = machine.summary()
    for by_weights in found.values():
        for own in by_weights.values():
            own["of_read"] = round(own["weights_gb_s"] / limits["read_gb_s"]["median"], 2)
            own["of_bf16"] = round(own["gflop_s"] / limits["bf16_gflop_s"]["median"], 2)
    return found, machine


def _ticks() -> int:
    return load_library().ticks()


def show(results: dict[str, Any], machine: Machine) -> None:
    print(
        "case         weights       p50      p95      p99 ms    tok/s   GB/s, of read  GFLOP/s, of bf16  parts, mean ms"
    )
    for case, by_weights in results.items():
        for weights, r in by_weights.items():
            parts = ", ".join(f"{part} {ms}" for part, ms in r["parts_mean_ms"].items())
            limits = f"{r['weights_gb_s']:6.1f} {r['of_read']:7.0%} {r['gflop_s']:9.1f} {r['of_bf16']:8.0%}"
            print(
                f"{case:<12} {weights:<8} {r['p50_ms']:8.2f} {r['p95_ms']:8.2f} {r['p99_ms']:8.2f}    "
                f"{r['tokens_per_s']:8.1f} {limits}   {parts}; host {r['host_ms']}"
            )
    print(f"the machine, same minutes: {machine.summary()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="auto", help=f"with commas: {', '.join(FORMATS)}, torch")
    parser.add_argument("--case", default=",".join(CASES), help="with commas")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure, all cases together")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    executors = [make(weights, args.threads) for weights in args.weights.split(",")]
    results, machine = measure(executors, args.case.split(","), args.seconds)
    conditions = {
        "model": "SmolLM2-135M-Instruct",
        "context": CONTEXT,
        "block_size": BLOCK_SIZE,
        "sampling": "greedy",
        "pipeline_depth": 1,
        "threads": args.threads,
        "machine": {**machine.summary(), "processor": platform.processor() or platform.machine()},
        "torch": torch.__version__,
        "commit": commit(),
    }
    if args.json:
        print(json.dumps({"conditions": conditions, "results": results}))
    else:
        show(results, machine)
    for executor in executors:
        executor.runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
