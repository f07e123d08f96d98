"""What a step costs the executor alone, on the CPU: no wire, no scheduler beside it.

    python -m bench.executor                                  loads and cases, weights as the default has them
    python -m bench.executor --weights auto,dense,torch       several executors beside each other
    python -m bench.executor --load W2 --case ""              one load, no case
    python -m bench.executor --load "" --case decode-8 --json   last line is one object: conditions, results

Loads: W1 to W4 (bench/load.py). The plans the real scheduler makes for them are made beforehand, with the defaults of a
service and the step costs that the first executor measured of itself, and replayed on every executor at the pipeline's
depth. Cases: steps made by hand, one at a time; bench/executor_cases.py says which there are.
Weights: auto (as the file has them), dense (bfloat16), int8, int4: the CPU kernels, where they can be had; torch: the
same model in torch's own operations. Executors, loads and cases take turns, so that a disturbance of the machine hits
all of them. Start-up is not in the numbers.

Of each: percentiles of a step; the bytes it must at least move (weights as held, keys and values read and written) and
the operations it must do (bench/step_work.py), per second of all its time. Beside them the share of what the machine
gave in the same minutes: memory read; as many bytes as the executor's weights, read time after time, part of which may
stay in a cache; bfloat16 products.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from bench import executor_steps
from bench.executor_cases import CASES, CONTEXT, Samples, Turns, sizes_of, summarise
from bench.executor_loads import SERVICE_DEPTH, LoadReplayer, Planned, Taken
from bench.load import WORKLOADS, Workload
from bench.machine import Machine
from bench.serving import commit
from bench.step_work import StepSize
from executor_svc.app import SWITCH_INTERVAL_S
from executor_svc.kernels_cpu.decoder import NativeDecoder
from executor_svc.runner import Runner

WEIGHTS: Final = ("auto", "dense", "int8", "int4", "torch")
NUM_BLOCKS: Final = 2048
# By load or case, then by weights.
Results = dict[str, dict[str, Any]]


def run_loads(
    runners: Mapping[str, Runner], loads: Mapping[str, Workload], depth: int, repeat: int, machine: Machine
) -> Results:
    """`repeat` turns over all loads and executors."""
    first = next(iter(runners.values())).info
    planned = {name: Planned.of(first, load, depth) for name, load in loads.items()}
    replayers = {weights: LoadReplayer(runner, depth) for weights, runner in runners.items()}
    taken = {(name, weights): Taken() for name in loads for weights in runners}
    for turn in range(repeat):
        for name in loads:
            for weights, replayer in replayers.items():
                machine.measure()
                if not turn:
                    replayer.warm_up(planned[name])
                begin = time.perf_counter()
                replayer.replay(planned[name], taken[name, weights])
                _tell(f"{name} on {weights}, turn {turn + 1}", begin)
                machine.measure()
    return {name: {weights: taken[name, weights].summarise() for weights in runners} for name in loads}


def run_cases(runners: Mapping[str, Runner], cases: Sequence[str], seconds: float, machine: Machine) -> Results:
    """Turns over all cases and executors until the time is up; the first turn warms up and does not count."""
    turning = {weights: Turns(runner) for weights, runner in runners.items()}
    samples = {(case, weights): Samples() for case in cases for weights in runners}
    clocks = [_ticks(runner) for runner in runners.values()]
    begin, end = time.monotonic_ns(), time.perf_counter() + seconds
    turns = 0
    while turns < 2 or time.perf_counter() < end:
        machine.measure()
        for case in cases:
            for weights, own in turning.items():
                own.run(case, samples[case, weights] if turns else Samples())
        turns += 1
    spent = time.monotonic_ns() - begin
    per_ns = {
        weights: (_ticks(runner) - before) / spent
        for (weights, runner), before in zip(runners.items(), clocks, strict=True)
    }
    return {
        case: {weights: summarise(samples[case, weights], per_ns[weights]) for weights in runners} for case in cases
    }


def _tell(what: str, begin: float) -> None:
    """What was done, while the rest goes on."""
    print(f"{what}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


def _ticks(runner: Runner) -> int:
    """The clock by which kernels count what their parts take; 0: torch computes."""
    return runner.model.library.ticks() if isinstance(runner.model, NativeDecoder) else 0


def weight_bytes(runner: Runner) -> int:
    """That a step reads."""
    size = StepSize.of(runner.model, runner.cache.shape)
    return size.layer_bytes + size.head_bytes


def add_shares(found: dict[str, Any], machine: Machine, reread: int) -> None:
    """Of the machine's limits, wherever rates stand in `found`, which is of an executor whose steps read `reread`
    bytes of weights."""
    if "gb_s" not in found:
        for value in found.values():
            add_shares(value, machine, reread)
        return
    limits = machine.summary()
    found["of_read"] = round(found["gb_s"] / limits["read_gb_s"]["median"], 3)
    found["of_reread"] = round(found["gb_s"] / machine.again(reread)["median"], 3)
    found["of_bf16"] = round(found["gflop_s"] / limits["bf16_gflop_s"]["median"], 3)


def show(loads: Results, cases: Results, machine: Machine) -> None:
    what = f"{'':<8}{'p50':>8}{'p95':>9}{'p99 ms':>9}{'out tok/s':>11}   GB/s, of read, reread  GFLOP/s, of bf16"
    if loads:
        print(f"{'load, its steps':<20} {what}   MB of weights, KV read, written")
    for name, by_weights in loads.items():
        for weights, by_kind in by_weights.items():
            for kind, r in by_kind.items():
                print(_line(f"{name} {kind}, {r['steps']}", weights, r))
    if cases:
        print(f"{'case, its steps':<20} {what}   MB of weights, KV read, written")
    for name, by_weights in cases.items():
        for weights, r in by_weights.items():
            print(_line(f"{name}, {r['steps']}", weights, r))
            parts = ", ".join(f"{part} {ms}" for part, ms in r["parts_mean_ms"].items())
            print(f"{'':<21}parts, mean ms: {parts + '; ' if parts else ''}host {r['host_ms']}")
    print(f"the machine, same minutes: {machine.summary()}")


def _line(name: str, weights: str, r: dict[str, Any]) -> str:
    times = f"{r['p50_ms']:8.2f}{r['p95_ms']:9.2f}{r['p99_ms']:9.2f}{r['output_tokens_per_s']:11.1f}"
    rates = f"{r['gb_s']:7.1f}{r['of_read']:9.0%}{r['of_reread']:8.0%}{r['gflop_s']:9.1f}{r['of_bf16']:9.0%}"
    moved = f"{r['weights_mb']:.1f}, {r['kv_read_mb']:.1f}, {r['kv_written_mb']:.2f}"
    return f"{name:<20} {weights:<8}{times}{rates}   {moved}"


def held(runner: Runner, machine: Machine) -> dict[str, Any]:
    """What one executor is."""
    size, info = StepSize.of(runner.model, runner.cache.shape), runner.info
    return {
        "computes": "CPU kernels" if isinstance(runner.model, NativeDecoder) else "torch",
        "layer_bytes": size.layer_bytes,
        "head_bytes": size.head_bytes,
        "kv_token_bytes": size.kv_token_bytes * size.config.num_layers,
        "reread_gb_s": machine.again(weight_bytes(runner)),
        "measured_us": {
            "step": info.decode_step_ns // 1000, "row": info.decode_row_ns // 1000,
            "prompt_token": info.prefill_token_ns // 1000,
        },
    }  # fmt: skip


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _cases(text: str) -> list[str]:
    for case in _names(text):
        try:
            sizes_of(case)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{case}; bench/executor_cases.py says which there are") from None
    return _names(text)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=_names, default=["auto"], help=f"with commas: {', '.join(WEIGHTS)}")
    parser.add_argument("--load", type=_names, default=list(WORKLOADS), help="with commas; empty: none")
    parser.add_argument("--case", type=_cases, default=list(CASES), help="with commas; empty: none")
    parser.add_argument("--depth", type=int, default=SERVICE_DEPTH, help="plans in flight while a load is replayed")
    parser.add_argument("--repeat", type=int, default=1, help="how often each load is replayed")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure, all cases together")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="", help="as the executor takes it")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="as the executor takes it")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    args = parser.parse_args(argv)
    for name, wrong in (("--weights", set(args.weights) - {*WEIGHTS}), ("--load", set(args.load) - {*WORKLOADS})):
        if wrong:
            parser.error(f"{name}: {', '.join(sorted(wrong))}")
    if not args.weights or not (args.load or args.case):
        parser.error("nothing to measure")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an executor's process
    runners = {}
    for weights in args.weights:
        begin = time.perf_counter()
        runners[weights] = executor_steps.build(
            args.model, threads=args.threads, weights=weights, load_format=args.load_format, num_blocks=NUM_BLOCKS
        )
        _tell(f"{weights} is ready", begin)
    gc.collect()
    read = {weights: weight_bytes(runner) for weights, runner in runners.items()}
    machine = Machine(read.values())
    loads = run_loads(runners, {name: WORKLOADS[name] for name in args.load}, args.depth, args.repeat, machine)
    cases = run_cases(runners, args.case, args.seconds, machine) if args.case else {}
    for by_weights in (*loads.values(), *cases.values()):
        for weights, found in by_weights.items():
            add_shares(found, machine, read[weights])
    info = next(iter(runners.values())).info
    conditions = {
        "model": info.model_id,
        "executors": {weights: held(runner, machine) for weights, runner in runners.items()},
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "sampling": "greedy, full length",
        "loads": {name: vars(WORKLOADS[name]) for name in args.load},
        "pipeline_depth": {"loads": args.depth, "cases": 1},
        "cases_context": CONTEXT,
        "repeat": args.repeat,
        "threads": args.threads,
        "machine": {**machine.summary(), "processor": platform.processor() or platform.machine()},
        "torch": torch.__version__,
        "commit": commit(),
    }
    if args.json:
        print(json.dumps({"conditions": conditions, "results": {"loads": loads, "cases": cases}}))
    else:
        show(loads, cases, machine)
        print(json.dumps(conditions, indent=1))
    for runner in runners.values():
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
