"""What a GPU reaches, part by part, beside the limits measured on it in the same run.

    python -m bench.gpu --part kernels           each kernel: right on this device, then GB/s or TFLOP/s
    python -m bench.gpu --part kernels --json    last line is one object: conditions, results

Needs a CUDA build of torch 2.11 or newer and the triton that comes with it. Without a GPU it says so and ends with 0.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

Rows = list[dict[str, Any]]


def _kernels() -> Rows:
    from bench.gpu_kernels import run  # only now: it loads triton

    return run(torch.device("cuda"))


PARTS: dict[str, Callable[[], Rows]] = {"kernels": _kernels}


def conditions() -> dict[str, str]:
    """What the numbers hold for."""
    import triton

    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=10,
    )  # fmt: skip
    return {
        "device": torch.cuda.get_device_name(),
        "multiprocessors": str(torch.cuda.get_device_properties(0).multi_processor_count),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "commit": described.stdout.strip() or "unknown",
        "precision": "bfloat16, sums in float32",
        "timing": "replays of a CUDA graph between events, minimum of five; what is read once is larger than the L2",
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="default: all")
    parser.add_argument("--json", action="store_true", help="last line is one JSON object")
    arguments = parser.parse_args(argv)
    missing = None
    if not torch.cuda.is_available():
        missing = f"no CUDA device (torch {torch.__version__})"
    elif find_spec("triton") is None:
        missing = "no triton beside this torch"
    if missing:
        print(f"bench.gpu: {missing}: nothing measured")
        return 0
    told = conditions()
    for name, value in told.items():
        print(f"{name}: {value}")
    results = {part: PARTS[part]() for part in arguments.part or sorted(PARTS)}
    wrong = [row for rows in results.values() for row in rows if row.get("right") is False]
    for row in wrong:
        print(f"WRONG: {row}")
    if arguments.json:
        print(json.dumps({"conditions": told, "results": results}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
