"""`fast` numerics on CUDA: what lies between the products is one kernel each."""

import torch

from executor_svc.kernels import activation, norm
from executor_svc.numerics import FastOps


class TritonOps(FastOps):
    has_kernels = True

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_rms_norm(x, residual, weight, eps), residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)
