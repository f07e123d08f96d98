"""The operations whose numerics are a choice. A model computes its products through this seam and nothing else."""

from typing import Protocol

import torch


class Ops(Protocol):
    """`fast` takes the quickest kernel; `exact` gives each row of the result bits that do not depend on other rows."""

    @property
    def name(self) -> str:
        """ "fast" or "exact"."""
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: [num_tokens, in]; weight: [out, in]; bias: [out]. Returns [num_tokens, out] in x's dtype."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension, computed in float32, returned in x's dtype."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of residual + x, and residual + x, which may be written into `residual`."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [T, 2 width]. Returns silu(gate) * up, [T, width]."""
        ...
