"""One part of bench.gpu in a process of its own, so that neither its end nor its device memory touches the others.

python -P -m bench.gpu_part PART OPTIONS ROWS

OPTIONS is a JSON object, see `Options`. ROWS gets one JSON line for each thing measured, as soon as it is.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from bench.gpu_shapes import REHEARSED, SHAPES, WORKLOADS, write_shape

Row = dict[str, Any]
Emit = Callable[[Row], None]


@dataclass(frozen=True)
class Options:
    """`rehearse`: on the CPU, in the smallest sizes. Flags go to the services, after ours."""

    rehearse: bool = False
    api_workers: int = 4
    clients: int = 4
    max_tokens_per_step: int = 8192
    max_prefill_chunk: int = 1024
    executor_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


def _interpret(options: Options) -> None:
    """A rehearsal's kernels run in Triton's interpreter."""
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is loaded
        import_module("tests.interpreter")  # which teaches it what it lacks


def _kernels(options: Options, emit: Emit) -> None:
    _interpret(options)
    import torch

    from bench import gpu_kernels

    sizes = gpu_kernels.REHEARSED if options.rehearse else gpu_kernels.SIZES
    gpu_kernels.run(torch.device(options.device), sizes, emit)


def _model(options: Options, emit: Emit) -> None:
    _interpret(options)
    from bench import gpu_model

    sizes = gpu_model.REHEARSED if options.rehearse else gpu_model.Sizes()
    with tempfile.TemporaryDirectory() as place:
        gpu_model.run(options.device, sizes, Path(place), emit)


def _serve(shape: str) -> Callable[[Options, Emit], None]:
    def part(options: Options, emit: Emit) -> None:
        from bench import gpu_serve
        from bench.gpu_services import Setup

        with tempfile.TemporaryDirectory() as place:
            own = "tiny" if options.rehearse else shape
            setup = Setup(
                model=write_shape(own, Path(place)),
                device=options.device,
                max_num_seqs=4 if options.rehearse else 256,
                max_context=128 if options.rehearse else 2048,
                max_tokens_per_step=64 if options.rehearse else options.max_tokens_per_step,
                max_prefill_chunk=16 if options.rehearse else options.max_prefill_chunk,
                api_workers=1 if options.rehearse else options.api_workers,
                executor_flags=options.executor_flags,
                scheduler_flags=options.scheduler_flags,
            )
            plan = gpu_serve.Plan(own, SHAPES[own]["vocab_size"], **_extent(shape, options))
            emit({"what": "setup", "model": own, **setup.told()})
            gpu_serve.run(setup, plan, emit)

    return part


def _extent(shape: str, options: Options) -> dict[str, Any]:
    """How much is measured: what is slow, less often."""
    if options.rehearse:
        return {
            "workloads": REHEARSED, "repeats": dict.fromkeys(REHEARSED, 1), "depths": (1, 2), "compared": ("G2",),
            "compared_repeats": 1, "watched": ("G2",), "alone": ("G1", "G2"), "alone_repeats": 1, "clients": 2,
        }  # fmt: skip
    if shape == "l8b":
        return {
            "workloads": WORKLOADS, "repeats": {"G3": 2, "G4": 1}, "compared": ("G2",), "compared_repeats": 1,
            "watched": ("G2", "G3"), "alone": ("G1", "G2"), "alone_repeats": 2, "clients": options.clients,
        }  # fmt: skip
    return {"workloads": WORKLOADS, "repeats": {}, "compared": ("G1", "G2", "G3"), "clients": options.clients}


PARTS: Final[dict[str, Callable[[Options, Emit], None]]] = {
    "kernels": _kernels, "model": _model, "l1b": _serve("l1b"), "l8b": _serve("l8b"),
}  # fmt: skip


def emitter(file: IO[str], loud: bool) -> Emit:
    def emit(row: Row) -> None:
        file.write(json.dumps(row) + "\n")
        file.flush()
        if loud:
            print(json.dumps(row), flush=True)

    return emit


def main(argv: list[str]) -> int:
    part, options, out = argv
    with Path(out).open("a") as file:
        # The kernels tell their rows themselves.
        PARTS[part](Options(**json.loads(options)), emitter(file, loud=part != "kernels"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
