"""Quantised GGUF tensors as the blocks that the CPU kernels multiply.

The usual types go over number by number. The rest, of 2 and 3 bits or with numbers out of tables, become 8 bits:
that rounds a weight by at most 1/254 of the largest of its 32, little beside what such types round themselves.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from executor_svc.kernels_cpu.packing import GROUP, Blocks, Format, quantise

_KEPT: Final = {
    GGMLQuantizationType.Q8_0: Format.INT8,
    GGMLQuantizationType.Q4_0: Format.INT4_0,
    GGMLQuantizationType.Q4_1: Format.INT4,
    GGMLQuantizationType.Q4_K: Format.INT4_K,
    GGMLQuantizationType.Q5_K: Format.INT5_K,
    GGMLQuantizationType.Q6_K: Format.INT6_K,
}
_SLAB: Final = 1 << 20  # weights made floats at a time, which stay in a cache


def format_of(kind: GGMLQuantizationType) -> Format:
    """What a matrix of `kind` becomes where nothing is asked of it."""
    elements, _ = GGML_QUANT_SIZES[kind]
    return _KEPT.get(kind, Format.DENSE if elements == 1 else Format.INT8)


def read_blocks(raw: NDArray[np.uint8], kind: GGMLQuantizationType, *, only_kept: bool) -> Blocks | None:
    """raw: [rows, bytes of a row], quantised. None: for `only_kept`, where it would have to be rounded again.

    Raises NotImplementedError where the gguf library can not read `kind`.
    """
    if kind in _KEPT:
        return _kept(raw.reshape(len(raw), -1, GGML_QUANT_SIZES[kind][1]), kind)
    return None if only_kept else _rounded(raw, kind)


def _kept(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> Blocks:
    """raw: [rows, blocks, bytes of one]. Layouts: ggml's ggml-common.h."""
    rows = len(raw)

    def halves(start: int, count: int = 1) -> NDArray[np.float16]:
        return np.ascontiguousarray(raw[:, :, start : start + 2 * count]).view(np.float16)

    def signed(start: int, end: int) -> NDArray[np.int8]:
        return np.ascontiguousarray(raw[:, :, start:end]).view(np.int8)

    if kind == GGMLQuantizationType.Q8_0:
        return Blocks(Format.INT8, signed(2, 34).reshape(rows, -1), halves(0)[:, :, 0])
    if kind in (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K):
        own, least = _of_six_bits(raw[:, :, 4:16])
        # Of each 32 bytes the lower halves are one group, the upper ones the next.
        numbers = _nibbles(raw[:, :, -128:], GROUP).reshape(rows, -1)
        if kind == GGMLQuantizationType.Q5_K:
            bits = [raw[:, :, 16:48] >> np.uint8(group) & np.uint8(1) for group in range(8)]
            numbers |= np.concatenate(bits, axis=2).reshape(rows, -1) << np.uint8(4)
        factors = halves(0, 2) * np.array([1, -1], np.float16)
        return Blocks(format_of(kind), numbers, own.view(np.int8), least.view(np.int8), factors)
    if kind == GGMLQuantizationType.Q6_K:
        numbers = _nibbles(raw[:, :, :128], 64).reshape(rows, -1)
        numbers |= _crumbs(raw[:, :, 128:192]).reshape(rows, -1) << np.uint8(4)
        return Blocks(Format.INT6_K, numbers, signed(192, 208).reshape(rows, -1), factors=halves(208))
    numbers = _nibbles(raw[:, :, -GROUP // 2 :], GROUP // 2).reshape(rows, -1)
    minima = halves(2)[:, :, 0] if kind == GGMLQuantizationType.Q4_1 else None
    return Blocks(format_of(kind), numbers, halves(0)[:, :, 0], minima)


def _nibbles(packed: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """[rows, blocks, n] → [rows, blocks, 2 * n]: of each `size` bytes the lower halves, then the upper ones."""
    own = packed.reshape(*packed.shape[:2], -1, 1, size)
    return np.concatenate((own & 15, own >> 4), axis=3).reshape(*packed.shape[:2], -1)


def _crumbs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same of quarters, of each 32 bytes."""
    own = packed.reshape(*packed.shape[:2], -1, 1, 32)
    return np.concatenate([own >> bit & 3 for bit in (0, 2, 4, 6)], axis=3).reshape(*packed.shape[:2], -1)


def _of_six_bits(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """packed: [rows, blocks, 12]. Returns the scales and the minima of the 8 groups, [rows, blocks * 8]. The first four
    have the low 6 bits of bytes 0 to 3 and 4 to 7; the others 4 bits in bytes 8 to 11, and the two above those of the
    first."""
    scales, minima, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    return (
        np.concatenate((scales & 63, rest & 15 | scales >> 6 << 4), axis=2).reshape(len(packed), -1),
        np.concatenate((minima & 63, rest >> 4 | minima >> 6 << 4), axis=2).reshape(len(packed), -1),
    )


def _rounded(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> Blocks:
    elements, size = GGML_QUANT_SIZES[kind]
    rows, depth = len(raw), raw.shape[1] // size * elements
    numbers, scales = np.empty((rows, depth), np.int8), np.empty((rows, depth // GROUP), np.float16)

    def fill(slab: slice) -> None:
        values: NDArray[Any] = dequantize(raw[slab], kind)
        blocks = quantise(values, Format.INT8)
        numbers[slab], scales[slab] = blocks.numbers, blocks.scales

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(fill, _slabs(rows, max(1, _SLAB // depth))):
            pass
    return Blocks(Format.INT8, numbers, scales)


def _slabs(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))
