"""Random weights in a model's shapes, for benchmarks and tests that need no checkpoint."""

import zlib

import torch

from executor_svc.kernels_cpu.packing import Blocks
from executor_svc.loader.names import Part


class RandomSource:
    """A TensorSource without files: matrices and biases normal with deviation `scale`, norms 1, bfloat16, on `device`.

    Each tensor depends on its name alone; the bits differ from one kind of device to another.
    """

    def __init__(self, device: torch.device, scale: float) -> None:
        self._device = device
        self._scale = scale

    def read(self, part: Part) -> torch.Tensor:
        if len(part.shape) == 1 and not part.hf_name.endswith(".bias"):
            return torch.ones(part.shape, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(device=self._device).manual_seed(zlib.crc32(part.hf_name.encode()))
        values = torch.empty(part.shape, dtype=torch.bfloat16, device=self._device)
        return values.normal_(0.0, self._scale, generator=generator)

    def read_blocks(self, part: Part, *, only_kept: bool = False) -> Blocks | None:
        return None

    def rope_divisors(self, head_dim: int) -> torch.Tensor | None:
        return None
