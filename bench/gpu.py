"""What a GPU reaches, beside the limits measured on it in the same run and beside vLLM's numbers. At most six minutes.

    python -m bench.gpu                          everything
    python -m bench.gpu --part kernels           each kernel: right on this device, then GB/s or TFLOP/s
    python -m bench.gpu --part model             the whole model: float32 reference, graphs, depths, chunks
    python -m bench.gpu --part l1b --part l8b    the services under load: table, depths, idle gaps, start-up, split
    python -m bench.gpu --rehearse               the same on the CPU in the smallest sizes: does the script run?
    python -m bench.gpu --json --out DIR         last line is one object: conditions, results; a record in DIR

Runs from a checkout, nothing installed but what docs/gpu-bench.md lists (Python 3.11 or newer, torch 2.11 with its
triton, or newer); it says at once what is missing. Each part is a process with a time limit; one that fails or runs out
of time keeps what it had measured and costs the others nothing. Without a GPU it says so and ends with 0.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
# Seconds after which a part is cut off. With what starting takes (torch is loaded twice) and with two waits of STOP_S
# for each part that is cut off they are six minutes.
# In this order: what a part compiles, the next ones find.
LIMITS: Final = {"model": 65, "kernels": 60, "l1b": 88, "l8b": 97}
START_S: Final = 26.0
STOP_S: Final = 3.0
REHEARSED: Final = ("model", "kernels", "l1b")
REHEARSE_S: Final = 120.0  # of each part: on a CPU with other things to do

Rows = list[dict[str, Any]]


def conditions(rehearse: bool) -> dict[str, Any]:
    """What the numbers hold for."""
    from bench.gpu_services import device_memory
    from bench.serving import commit

    return {
        "device": device_memory() if not rehearse else "none: a rehearsal on the CPU, its numbers mean nothing",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "grpcio", "numpy")},
        "cpus": os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "precision": "bfloat16, sums in float32; random weights",
        "sampling": "greedy, full length, fresh random prompts, no prefix found in the cache",
        "kernel_timing": "replays of a CUDA graph between events, minimum of five; what is read once is larger than L2",
        "service": "public API, streaming, token ids in and out, services and clients on this machine",
    }


def run_part(part: str, options: str, limit_s: float) -> tuple[Rows, dict[str, Any]]:
    """Rows that the part had, and how it ended."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        rows = Path(place, "rows")
        rows.touch()
        # A group of its own: what a part that is cut off has started ends with it.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.gpu_part", part, options, str(rows)], process_group=0
        )
        try:
            status: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = f"cut off after {limit_s:.0f} s"
        finally:
            _end(process)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    wall_s = round(time.monotonic() - start, 1)
    return found, {"part": part, "ended": "well" if status == 0 else str(status), "wall_s": wall_s}


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=tuple(LIMITS), action="append", help="default: all")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in the smallest sizes")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="a part's time limit")
    parser.add_argument("--api-workers", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4, help="load processes")
    parser.add_argument("--max-tokens-per-step", type=int, default=8192)
    parser.add_argument("--max-prefill-chunk", type=int, default=1024)
    parser.add_argument("--executor-flags", default="", help="more flags for the executor, in one string")
    parser.add_argument("--scheduler-flags", default="", help="the same for the scheduler")
    parser.add_argument("--note", default="", help="conditions only you know: the commit where there is no git, say")
    parser.add_argument("--out", default=os.environ.get("OUT", ""), help="where record and rows go; default: $OUT")
    parser.add_argument("--json", action="store_true", help="last line is one JSON object")
    return parser.parse_args(argv)


def limits(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part. Raises SystemExit for one that is none."""
    found: dict[str, float] = dict.fromkeys(LIMITS, REHEARSE_S) if arguments.rehearse else dict(LIMITS)
    for text in arguments.limit:
        part, _, seconds = text.partition("=")
        if part not in LIMITS or not seconds.isdecimal():
            raise SystemExit(f"bench.gpu: --limit {text}: write PART=SECONDS, the part one of {', '.join(LIMITS)}")
        found[part] = float(seconds)
    return found


def why_not(rehearse: bool) -> tuple[int, list[str]]:
    """Exit status and what stands in the way; nothing does where the list is empty."""
    if find_spec("packaging") is None:
        return 1, ["packaging is not installed"]
    from bench.gpu_needs import broken, missing

    if find_spec("torch") is not None and not rehearse:
        import torch

        if not torch.cuda.is_available():
            return 0, [f"no CUDA device (torch {torch.__version__}): nothing measured; --rehearse tries the script"]
    if reason := broken():
        return 1, [reason, *missing(), "docs/gpu-bench.md says what to bring along"]
    return 0, []


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    wanted = limits(arguments)
    # From a checkout: for this process, and for all it starts with `python -P`.
    paths = [str(ROOT), str(ROOT / "protos"), str(ROOT / "client")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    status, reasons = why_not(arguments.rehearse)
    if reasons:
        print("\n".join(f"bench.gpu: {reason}" for reason in reasons))
        return status
    from bench.gpu_part import Options
    from bench.gpu_record import record

    options = Options(
        rehearse=arguments.rehearse,
        api_workers=arguments.api_workers,
        clients=arguments.clients,
        max_tokens_per_step=arguments.max_tokens_per_step,
        max_prefill_chunk=arguments.max_prefill_chunk,
        executor_flags=tuple(shlex.split(arguments.executor_flags)),
        scheduler_flags=tuple(shlex.split(arguments.scheduler_flags)),
    )
    told = conditions(arguments.rehearse) | {"options": asdict(options), "note": arguments.note}
    for name, value in told.items():
        print(f"{name}: {value}", flush=True)
    results: dict[str, Rows] = {}
    endings: Rows = []
    for part in arguments.part or (REHEARSED if arguments.rehearse else LIMITS):
        print(f"== {part} (at most {wanted[part]:.0f} s)", flush=True)
        results[part], ending = run_part(part, json.dumps(asdict(options)), wanted[part])
        endings.append(ending)
        print(f"== {part} ended: {ending['ended']}, {ending['wall_s']} s", flush=True)
        results["endings"] = endings
        if arguments.out:  # after each part: the next may take the machine with it
            keep(Path(arguments.out), told, results)
    print(record(told, results))
    if arguments.json:
        print(json.dumps({"conditions": told, "results": results}))
    return 1 if failures(results) else 0


def keep(place: Path, told: dict[str, Any], results: dict[str, Rows]) -> None:
    """The record and all numbers, as files."""
    from bench.gpu_record import record

    place.mkdir(parents=True, exist_ok=True)
    (place / "gpu.md").write_text(record(told, results) + "\n", encoding="utf-8")
    (place / "gpu.json").write_text(json.dumps({"conditions": told, "results": results}) + "\n")


def failures(results: dict[str, Rows]) -> Rows:
    """What is wrong: checks that failed and parts that did not end well."""
    wrong = [row for rows in results.values() for row in rows if row.get("right") is False]
    return [*wrong, *(ending for ending in results["endings"] if ending["ended"] != "well")]


if __name__ == "__main__":
    # So that a part in progress ends with this process.
    signal.signal(signal.SIGTERM, lambda number, stack: sys.exit(128 + number))
    sys.exit(main())
