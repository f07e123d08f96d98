"""Rotary position embedding from a table made once. Source: arXiv 2104.09864; scaling: see the functions."""

import math

import torch

from executor_svc.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim // 2], CPU: radians a pair of dimensions turns per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    powers = rope.theta**exponents
    base = 1.0 / powers
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, 1.0 / (rope.factor * powers), head_dim)
    return base


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1 model card)."""
    wavelength = 2 * math.pi / base
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    keep = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - keep) * base / rope.factor + keep * base
    scaled = torch.where(wavelength > longest, base / rope.factor, base)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, base: torch.Tensor, interpolated: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, a ramp lies between (arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return interpolated * ramp + base * (1 - ramp)


class RotaryTable:
    """Cosine and sine of every position up to `max_positions`: [max_positions, 1, head_dim // 2] each, model dtype."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        divisors: torch.Tensor | None = None,
    ) -> None:
        """`divisors`: float32 [head_dim // 2], divides the frequencies (GGUF files carry llama3 scaling so)."""
        frequencies = inverse_frequencies(rope, head_dim)
        if divisors is not None:
            frequencies = frequencies / divisors
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        # One table, so that a step gathers its rows in one launch: [max_positions, 2, head_dim // 2].
        table = torch.stack((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
        # [max_positions, 2, head_dim // 2]: cosines and sines.
        self.table = table.to(device=device, dtype=dtype)

    @property
    def max_positions(self) -> int:
        return self.table.shape[0]

    def gather(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int64 [T]. Returns (cos, sin), each [T, 1, head_dim // 2], for `rotate`."""
        rows = self.table.index_select(0, positions)
        return rows[:, 0:1], rows[:, 1:2]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, head_dim], any strides. Returns a new contiguous tensor.

    Only additions and products, each rounded once, so that the bits of a token do not depend on the batch it is in
    (a fused multiply-add may differ between vectorised body and scalar tail).
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.sub(first * cos, second * sin, out=rotated[..., :half])
    torch.add(second * cos, first * sin, out=rotated[..., half:])
    return rotated
