"""The kinds of executor the contract holds for: every attention backend, numerics and format of weights that the
configuration takes, graphs, and devices that are late or real. test_kinds.py says when one of the first three is
missing."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

from executor_svc.build import make_device
from executor_svc.kernels_cpu.packing import Format
from executor_svc.runner import Runner
from executor_svc.step_executor import StepExecutor
from executor_svc.streams import Device
from tests.contract.executors import native_runner, tiny_runner, tiny_toy, tiny_varlen
from tests.contract.late_device import LateDevice

CAN_INTERPRET = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Kind:
    """A Runner on the CPU. `backend`: its attention's, as the configuration names it; empty: the CPU kernels have their
    own. `weights`: of the CPU kernels, as `weight_dtype` names them. `buckets`: of its decode graphs."""

    backend: str = ""
    numerics: str = "fast"
    weights: str = "dense"
    buckets: tuple[int, ...] = ()

    @property
    def is_native(self) -> bool:
        return not self.backend

    @property
    def has_fixed_bits(self) -> bool:
        """Or near enough: tiny models' tokens lie apart by more than float32 rounds. Quantised weights meet few rows
        and many in products that round differently, which tokens can hang on."""
        return not self.is_quantised

    @property
    def is_quantised(self) -> bool:
        return self.weights != "dense"

    @property
    def is_interpreted(self) -> bool:
        return self.backend == "triton"

    @property
    def num_layers(self) -> int:
        """One takes the interpreter half the time."""
        return 1 if self.is_interpreted else 2

    def make(
        self,
        *,
        nan_token: bool = False,
        device: Device | None = None,
        depth: int = 4,
        buckets: Sequence[int] | None = None,
    ) -> Runner:
        """Skips where this machine has not what it needs."""
        buckets = self.buckets if buckets is None else buckets
        if self.is_native:
            weights = Format[self.weights.upper()]
            return native_runner(weights, device=device, nan_token=nan_token, depth=depth, buckets=buckets)
        if self.is_interpreted and not CAN_INTERPRET:
            pytest.skip("needs Triton's interpreter")
        return tiny_runner(
            numerics=self.numerics,
            device=device,
            nan_token=nan_token,
            depth=depth,
            buckets=buckets,
            num_layers=self.num_layers,
            attention_backend=tiny_varlen() if self.backend == "varlen" else self.backend,
        )


RUNNERS = {
    "torch": Kind("torch"),
    "exact": Kind("exact", "exact"),
    "graphs": Kind("exact", "exact", buckets=(1, 2, 4, 8)),
    "varlen": Kind("varlen", buckets=(1, 2, 4, 8)),
    # Decode steps of more than four rows run eagerly.
    "triton": Kind("triton", buckets=(1, 2, 4)),
    "triton exact": Kind("triton", "exact"),
    "native": Kind(),
    "native int8": Kind(weights="int8"),
    "native int4": Kind(weights="int4"),
}
KINDS = ("toy", "late", *RUNNERS, "cuda")


def make_executor(kind: str, *, nan_token: bool = False) -> StepExecutor:
    """One of KINDS. Skips where this machine has not what it needs."""
    if kind in RUNNERS:
        return RUNNERS[kind].make(nan_token=nan_token)
    if kind == "late":
        return RUNNERS["exact"].make(device=LateDevice(seed=1), nan_token=nan_token)
    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        device = make_device("cuda")
        return tiny_runner(numerics="fast", device=device, nan_token=nan_token, buckets=(1, 2, 4, 8))
    assert kind == "toy"
    return tiny_toy(nan_token=nan_token)
