"""Weights in the order weights.h reads them. The formats, and what a piece and a panel are, are told there."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.host_memory import Arena

GROUP: Final = 32  # weights of one row with one scale
PANEL: Final = 32
_TILE: Final = 16
_TOGETHER: Final = 8  # pieces with common factors


class Format(IntEnum):
    DENSE = 0
    INT8 = 1
    INT4 = 2
    INT4_0 = 3
    INT4_K = 4
    INT5_K = 5
    INT6_K = 6


# Of a weight, with its share of what is stored for its group and for 256 weights together.
BITS: Final = {
    Format.DENSE: 16.0,
    Format.INT8: 8.5,
    Format.INT4: 5.0,
    Format.INT4_0: 4.5,
    Format.INT4_K: 4.625,
    Format.INT5_K: 5.625,
    Format.INT6_K: 6.5625,
}
# What numbers are too large by where a weight is scale * number and no more.
_MIDDLE: Final = {Format.INT4_0: 8, Format.INT6_K: 32}


def common_format(kinds: Collection[Format]) -> Format:
    """What a matrix becomes whose pieces are of `kinds`."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return Format.DENSE if Format.DENSE in kinds else Format.INT8


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A quantised matrix [rows, depth], in groups along the depth, as GGUF's types have them.

    A weight is scale * number (+ minimum). Scales and minima: [rows, depth / 32].
      INT8    Q8_0: numbers int8; scales float16
      INT4    Q4_1: numbers uint8 of 0 to 15; scales, minima float16
      INT4_0  Q4_0: the same, 8 too large, without minima
      INT4_K  Q4_K: the same; scales, minima int8, multiples of `factors`, float16 [rows, depth / 256, 2]
      INT5_K  Q5_K: the same, of 0 to 31
      INT6_K  Q6_K: numbers uint8 of 0 to 63, 32 too large; scales int8 [rows, depth / 16], multiples of `factors`,
              float16 [rows, depth / 256, 1]
    """

    format: Format
    numbers: NDArray[Any]
    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    factors: NDArray[np.float16] | None = None

    def values(self) -> NDArray[np.float32]:
        numbers = self.numbers.astype(np.float32) - _MIDDLE.get(self.format, 0)
        wide = numbers * self._each(self.scales, 0)
        return wide if self.minima is None else wide + self._each(self.minima, 1)

    def _each(self, of_groups: NDArray[Any], which: int) -> NDArray[np.float32]:
        """For every weight its group's, times the factor it is a multiple of."""
        depth = self.numbers.shape[1]
        wide = of_groups.astype(np.float32)
        if self.factors is not None:
            factors = self.factors[:, :, which].astype(np.float32)
            wide = wide * np.repeat(factors, wide.shape[1] // factors.shape[1], axis=1)
        return np.repeat(wide, depth // wide.shape[1], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """data: uint8, aligned; columns and depth as the matrix had them (out, in); bias: float32, in the panels' order."""

    format: Format
    columns: int
    depth: int
    data: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


def quantise(values: NDArray[np.float32], wanted: Format) -> Blocks:
    """Nearest numbers; INT8 symmetric, INT4 between least and greatest of each group."""
    rows, depth = values.shape
    groups = values.reshape(rows, depth // GROUP, GROUP)
    if wanted is Format.INT8:
        scales = (np.abs(groups).max(axis=2) / 127).astype(np.float16)
        numbers = np.rint(groups / _nonzero(scales)[:, :, None]).clip(-127, 127).astype(np.int8)
        return Blocks(wanted, numbers.reshape(rows, depth), scales)
    assert wanted is Format.INT4
    least = groups.min(axis=2).astype(np.float16)
    scales = ((groups.max(axis=2) - least.astype(np.float32)) / 15).astype(np.float16)
    numbers = np.rint((groups - least.astype(np.float32)[:, :, None]) / _nonzero(scales)[:, :, None])
    return Blocks(wanted, numbers.clip(0, 15).astype(np.uint8).reshape(rows, depth), scales, least)


def _nonzero(scales: NDArray[np.float16]) -> NDArray[np.float32]:
    wide = scales.astype(np.float32)
    return np.where(wide == 0, np.float32(1), wide)


def pack(
    pieces: Sequence[torch.Tensor | Blocks], wanted: Format | None, *, bias: torch.Tensor | None = None,
    gated: bool = False, arena: Arena | None = None
) -> Packed:  # fmt: skip
    """One matrix, its rows the pieces' one after the other. `wanted`: None keeps blocks as they are (8 bits where some
    pieces have 4 and some 8, bfloat16 where one is not quantised). `gated`: the rows are gate's, then up's; each panel
    gets 16 of both. `arena`: where the weights shall lie; None: anywhere."""
    arena = arena or Arena()
    kinds = {piece.format if isinstance(piece, Blocks) else Format.DENSE for piece in pieces}
    target = common_format(kinds) if wanted is None else wanted
    if target is Format.DENSE:
        dense = torch.cat([_dense(piece) for piece in pieces])
        order = _order(dense.shape[0], gated)
        columns, depth = dense.shape
        data = _pack_dense(_padded(dense[order] if gated else dense), arena)
    else:
        blocks = [
            piece if isinstance(piece, Blocks) and piece.format is target else quantise(_float32(piece), target)
            for piece in pieces
        ]
        columns, depth = sum(len(b.numbers) for b in blocks), blocks[0].numbers.shape[1]
        order = _order(columns, gated)
        data = _pack_blocks(blocks, order.numpy(), target, arena)
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float()[order], (0, -columns % PANEL))
    return Packed(target, columns, depth, data, bias)


def _float32(piece: torch.Tensor | Blocks) -> NDArray[np.float32]:
    return piece.values() if isinstance(piece, Blocks) else piece.float().numpy()


def _dense(piece: torch.Tensor | Blocks) -> torch.Tensor:
    values = torch.from_numpy(piece.values()) if isinstance(piece, Blocks) else piece
    return values.to(torch.bfloat16)


def _order(rows: int, gated: bool) -> torch.Tensor:
    """Where each column of the panels comes from."""
    order = torch.arange(rows)
    return order.view(2, -1, _TILE).transpose(0, 1).reshape(-1) if gated else order


def _padded(dense: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(dense, (0, 0, 0, -dense.shape[0] % PANEL))


def _pack_dense(dense: torch.Tensor, arena: Arena) -> torch.Tensor:
    rows, depth = dense.shape
    tiles = dense.view(rows // PANEL, 2, _TILE, depth // GROUP, _TILE, 2).permute(0, 3, 1, 4, 2, 5)
    out = arena.take(rows * depth * 2)
    out.view(torch.bfloat16).view(tiles.shape).copy_(tiles)
    return out


def _pack_blocks(blocks: Sequence[Blocks], order: NDArray[np.int64], target: Format, arena: Arena) -> torch.Tensor:
    numbers = _rows([b.numbers for b in blocks], order)
    rows, depth = numbers.shape
    panels, pieces = rows // PANEL, depth // GROUP

    def per_column(arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
        return _per_column(_rows(arrays, order), pieces)

    scales = per_column([b.scales for b in blocks])
    minima = [b.minima for b in blocks if b.minima is not None]
    if target is Format.INT8:
        fours = numbers.reshape(panels, 2, _TILE, pieces, GROUP // 4, 4).transpose(0, 3, 1, 4, 2, 5)
        parts = [fours.reshape(panels, pieces, -1).view(np.uint8) ^ 128, scales]
    else:
        # Of a column's 8 numbers the even ones, then the odd ones; bytes from the low end.
        eights = numbers.reshape(panels, 2, _TILE, pieces, GROUP // 8, 2, 2, 2).transpose(0, 3, 1, 4, 2, 7, 5, 6)
        low, high = eights[..., 0], eights[..., 1]
        parts = [((low & 15) | high << 4).reshape(panels, pieces, -1)]
        if target is Format.INT5_K:  # [panels, pieces, half, word, column, byte]
            pairs = (low >> 4) | high >> 4 << 1
            fifth = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 2 | pairs[:, :, :, 2] << 4 | pairs[:, :, :, 3] << 6
            parts.append(fifth.reshape(panels, pieces, -1))
        if target is Format.INT6_K:
            pairs = ((low >> 4) | high >> 4 << 2).reshape(panels, pieces, 2, 2, 2, _TILE, -1)
            parts.append((pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4).reshape(panels, pieces, -1))
        parts.append(scales)
        if minima:
            parts.append(per_column(minima))
    factors = [b.factors for b in blocks if b.factors is not None]
    if factors:
        groups = pieces // _TOGETHER
        own = _rows(factors, order).reshape(rows, -1)
        parts = [_per_column(own, groups), np.concatenate(parts, axis=2).reshape(panels, groups, -1)]
    out = arena.take(sum(part.size for part in parts))
    np.concatenate(parts, axis=2, out=out.numpy().reshape(panels, parts[0].shape[1], -1))
    return out


def _rows(arrays: Sequence[NDArray[Any]], order: NDArray[np.int64]) -> NDArray[Any]:
    together = np.concatenate(arrays)[order]
    return np.pad(together, ((0, -len(together) % PANEL), *[(0, 0)] * (together.ndim - 1)))


def _per_column(values: NDArray[Any], pieces: int) -> NDArray[np.uint8]:
    """[rows, pieces * n] → bytes [panels, pieces, n, 32 columns]."""
    panels = len(values) // PANEL
    own = np.ascontiguousarray(values.reshape(panels, PANEL, pieces, -1).transpose(0, 2, 3, 1))
    return own.view(np.uint8).reshape(panels, pieces, -1)
