"""What the parts of bench.gpu measure and how they tell it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_timing import Bounds

# Data that is read once must not come from the L2 (50 to 60 MB): calls go round through this much.
SPREAD_BYTES = 512 << 20
# Of the size of what is wanted, in bfloat16.
TOLERANCE = 2e-2
# The same in float32.
EXACT_TOLERANCE = 1e-4

Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A model's, as the workloads of the GPU name it."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    vocab: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Weights [out, in] of one layer, and of the head."""
        qkv = (self.heads + 2 * self.kv_heads) * self.dim
        return {
            "qkv": (qkv, self.hidden),
            "output": (self.hidden, self.heads * self.dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


@dataclass(frozen=True)
class Sizes:
    """What is measured. decode, and fixed, in exact numerics: (batch, context); prefill: (chunks, tokens of each,
    cached before each)."""

    shapes: tuple[Shape, ...]
    decode: tuple[tuple[int, int], ...]
    fixed: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    spread_bytes: int = SPREAD_BYTES


# Checks and measures the kernels of one subject.
Part = Callable[[Shape, Sizes, Bounds, torch.device], Iterator[Row]]


def make_row(
    kernel: str, shape: Shape, what: str, us: float, torch_us: float, error: float, bound: float, **more: object
) -> Row:
    """bound: the least microseconds that the bytes or the operations take at the measured limit."""
    row: Row = {"kernel": kernel, "model": shape.name, "what": what, "us": us, "torch_us": torch_us}
    return row | {"ratio": torch_us / us, "of_bound": bound / us, "error": error, "right": error <= TOLERANCE} | more


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, against the size of what is wanted."""
    if not got.isfinite().all():
        return float("inf")
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1.0))


def random_bf16(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)
