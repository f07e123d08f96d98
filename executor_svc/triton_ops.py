"""`fast` numerics on CUDA: what lies between the products is one kernel each, and of few rows the products too."""

import logging
from collections.abc import Callable, Iterable
from typing import Final

import torch
import torch.nn.functional as F

from executor_svc.graph_timing import replayed_ms
from executor_svc.kernels import activation, norm
from executor_svc.kernels.skinny import MAX_ROWS, SkinnyConfig, candidates_for, skinny_linear
from executor_svc.numerics import FastOps

log = logging.getLogger(__name__)

# Row counts that are measured; a count in between goes with the next one up.
_ROW_COUNTS: Final = (1, 2, 4, 8, MAX_ROWS)
# A measurement goes through more weights than the device's cache holds, several times.
_CACHE_BYTES: Final = 128 << 20


class TritonOps(FastOps):
    """`products` says by shape (out, in) and rows which kernel of ours is quicker than the library's; see `settle`."""

    has_kernels = True

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[tuple[int, int, int], SkinnyConfig] = {}
        self._settled: set[tuple[int, int]] = set()

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.shape[0]
        if rows <= MAX_ROWS and self.products:
            bucket = next(count for count in _ROW_COUNTS if rows <= count)
            config = self.products.get((weight.shape[0], weight.shape[1], bucket))
            if config is not None and rows:
                product = skinny_linear(x, weight, config)
                return product if bias is None else product.add_(bias)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm.add_rms_norm(x, residual, weight, eps), residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activation.silu_mul(gate_up)

    def settle(self, weights: Iterable[torch.Tensor]) -> None:
        """Measures the model's own weights, shape by shape, on the current CUDA stream, which is not the default one.

        A kernel is taken where it beats the library by 3 %: below that the choice would be noise. What was measured is
        not measured again: another runner over the same weights multiplies the same way.
        """
        shapes: dict[tuple[int, int], list[torch.Tensor]] = {}
        for weight in weights:
            shape, is_half = (weight.shape[0], weight.shape[1]), weight.dtype in (torch.bfloat16, torch.float16)
            if is_half and weight.is_contiguous() and shape not in self._settled:
                shapes.setdefault(shape, []).append(weight)
        self._settled |= shapes.keys()
        for (num_out, inner), same in shapes.items():
            for rows in _ROW_COUNTS:
                x = torch.randn(rows, inner, device=same[0].device).to(same[0].dtype)
                library = _time_ms(lambda w, x=x: F.linear(x, w), same)  # type: ignore[misc]
                times = {
                    config: _time_ms(lambda w, x=x, c=config: skinny_linear(x, w, c), same)  # type: ignore[misc]
                    for config in candidates_for(rows)
                }
                best = min(times, key=times.__getitem__)
                if times[best] < 0.97 * library:
                    self.products[num_out, inner, rows] = best
                log.info(
                    "%d rows x weights [%d, %d]: library %.1f us, %s %.1f us",
                    rows, num_out, inner, library * 1e3, best, times[best] * 1e3,
                )  # fmt: skip
        torch.cuda.empty_cache()  # each graph had memory of its own, which nothing else takes


def _time_ms(product: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor]) -> float:
    """Milliseconds of one product."""
    one = weights[0].numel() * weights[0].element_size()
    rounds = max(1, -(-_CACHE_BYTES // (one * len(weights))))
    return replayed_ms([lambda w=weight: product(w) for weight in weights], rounds)  # type: ignore[misc]
