"""The two numerics: `fast` takes the quickest kernels, `exact` gives every row bits that do not depend on its company.

`exact` is float32 with products chosen by experiment: at start-up the quickest of three ways is taken that gives, for
many numbers of rows, the very bits a row gets alone. The decision is logged and can be asked for.
"""

import logging
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final

import torch
import torch.nn.functional as F

from common.errors import ConfigError

log = logging.getLogger(__name__)

# Row counts the self-check tries; kernels switch their blocking at small counts and at powers of two.
_CHECK_COUNTS: Final = (*range(1, 34), 47, 48, 63, 64, 65, 96, 127, 128, 129, 200, 256, 257)
_TILE_ROWS: Final = 16
# In tiles, and a row at a time, more rows are more of the same products: two tiles and one row beyond show it.
_CHECK_COUNTS_APART: Final = range(1, 2 * _TILE_ROWS + 2)
# Elements below which PyTorch's CPU kernels run in one thread (its GRAIN_SIZE is 32768).
_SERIAL_ELEMENTS: Final = 32767


class FastOps:
    """Whatever is quickest for the dtype. `has_kernels`: operations are kernels of our own, see TritonOps."""

    has_kernels: bool = False

    def __init__(self) -> None:
        self._packed: dict[int, torch.Tensor] = {}

    @property
    def name(self) -> str:
        return "fast"

    def pack(self, weights: Iterable[torch.Tensor]) -> int:
        """Prepares CPU bfloat16 weights in the layout the matrix units read, so that no product repacks them.

        Returns the extra bytes taken. Weights given here must not change or be freed while this object lives.
        """
        taken = 0
        for weight in weights:
            if weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.data_ptr() not in self._packed:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
                self._packed[weight.data_ptr()] = packed
                taken += weight.numel() * weight.element_size()
        return taken

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._packed:
            packed = self._packed.get(weight.data_ptr())
            if packed is not None:
                result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
                return result
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def can_pack() -> bool:
    """Whether this processor and this torch have packed bfloat16 products."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Products(Enum):
    """Ways to multiply, quickest first."""

    BLAS = "the library's product of all rows at once"
    TILES = "the library's product of 16 rows at a time, padded"
    ROWS = "the library's product of each row alone"


class ExactOps:
    """float32, batch-invariant. `products` is decided by `settle` and until then the quickest."""

    has_kernels: Final = False

    def __init__(self, products: Products = Products.BLAS) -> None:
        self.products = products

    @property
    def name(self) -> str:
        return "exact"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # The bias is added apart: fused, it may enter the sum at a place that depends on the kernel.
        product = self.matmul(x, weight.t())
        return product if bias is None else product.add_(bias)

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[n, k] x [k, m], or batches: [e, n, k] x [e, k, m]. A row of a decides its row of the result alone."""
        rows = a.shape[-2]
        if self.products is Products.BLAS:
            # A product of one row takes another kernel (a matrix times a vector) in a batch than alone.
            if rows == 1 and a.dim() == 3:
                return torch.matmul(a.expand(-1, 2, -1), b)[:, :1]
            return torch.matmul(a, b)
        if self.products is Products.ROWS:
            return torch.cat([torch.matmul(a[..., i : i + 1, :], b) for i in range(rows)], dim=-2)
        padding = -rows % _TILE_ROWS
        padded = F.pad(a, (0, 0, 0, padding)) if padding else a
        tiles = [torch.matmul(padded[..., i : i + _TILE_ROWS, :], b) for i in range(0, rows + padding, _TILE_ROWS)]
        return torch.cat(tiles, dim=-2)[..., :rows, :]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.is_cuda:  # one block per row; a plain mean is summed in an order that depends on the number of rows
            return F.rms_norm(x, weight.shape, weight, eps)
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + eps)).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        rows = max(1, _SERIAL_ELEMENTS // gate.shape[1])
        if gate.is_cuda or gate.shape[0] <= rows:
            return F.silu(gate).mul_(up)
        # PyTorch's CPU kernel computes exp() differently in vector body and scalar tail, and where it splits work
        # between threads a tail begins anywhere. In pieces that stay in one thread, tails lie at fixed columns.
        return torch.cat([F.silu(piece) for piece in torch.split(gate, rows)]).mul_(up)

    def settle(self, shapes: Iterable[tuple[int, int]], device: torch.device) -> Products:
        """Takes the quickest products that are invariant for weights of these (out, in) shapes.

        Raises ConfigError when none is.
        """
        wanted = sorted(set(shapes))
        for products in Products:
            self.products = products
            broken = next((shape for shape in wanted if not self._is_invariant(shape, device)), None)
            if broken is None and self._is_norm_invariant(max(i for _, i in wanted), device):
                if products is not Products.BLAS:
                    log.warning("exact numerics run slowly here: %s", products.value)
                return products
            log.info("%s: not invariant for weights of shape %s", products.value, broken)
        raise ConfigError("exact numerics: no product on this machine is independent of its batch", field="numerics")

    def _is_invariant(self, shape: tuple[int, int], device: torch.device) -> bool:
        generator = torch.Generator(device="cpu").manual_seed(sum(shape))
        weight = torch.randn(shape, generator=generator).to(device)
        counts = _CHECK_COUNTS if self.products is Products.BLAS else _CHECK_COUNTS_APART
        x = torch.randn(max(_CHECK_COUNTS), shape[1], generator=generator).to(device)
        return _rows_stand_alone(lambda rows: self.linear(rows, weight), x, counts)

    def _is_norm_invariant(self, width: int, device: torch.device) -> bool:
        x = torch.randn(max(_CHECK_COUNTS), width, generator=torch.Generator().manual_seed(width)).to(device)
        weight = torch.ones(width, device=device)
        return _rows_stand_alone(lambda rows: self.rms_norm(rows, weight, 1e-5), x)


def _rows_stand_alone(
    compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, counts: Iterable[int] = _CHECK_COUNTS
) -> bool:
    """Whether each row of compute(x[a:b]) has the bits of compute(x[row:row + 1]), for many a and b."""
    sample = sorted({0, 1, 2, 3, 5, 11, 15, 16, 17, 31, 32, 46, 63, 64, 95, 127, 128, 199, 255, x.shape[0] - 1})
    alone = {row: compute(x[row : row + 1])[0] for row in sample}
    for count in counts:
        for first in (0, 5):
            together = compute(x[first : first + count])
            for row in sample:
                if first <= row < first + together.shape[0] and not torch.equal(together[row - first], alone[row]):
                    return False
    return True
