"""Quantised GGUF tensors as the blocks that the CPU kernels multiply.

Types whose groups of 32 have one scale, and 4 bits or 8, go over number by number. The rest, of 2, 3, 5 and 6 bits or
with numbers out of tables, become 8 bits: that rounds a weight by at most 1/254 of the largest of its 32, little beside
what such types round themselves.
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
    GGMLQuantizationType.Q4_0: Format.INT4,
    GGMLQuantizationType.Q4_1: Format.INT4,
    GGMLQuantizationType.Q4_K: Format.INT4,
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

    def halves(start: int) -> NDArray[np.float16]:
        return np.ascontiguousarray(raw[:, :, start : start + 2]).view(np.float16)

    scales = halves(0)
    if kind == GGMLQuantizationType.Q8_0:
        numbers = np.ascontiguousarray(raw[:, :, 2:]).view(np.int8)
        return Blocks(numbers.reshape(rows, -1), scales[:, :, 0], None)
    if kind == GGMLQuantizationType.Q4_K:
        # Of each 32 bytes the lower halves are one group, the upper ones the next.
        own, least = _of_six_bits(raw[:, :, 4:16])
        scales, minima = _product(scales, own), -_product(halves(2), least)
        both = raw[:, :, 16:].reshape(rows, -1, GROUP)
    else:
        minima = halves(2) if kind == GGMLQuantizationType.Q4_1 else scales * np.float16(-8)
        both = raw[:, :, -GROUP // 2 :]
    numbers = np.concatenate((both & 15, both >> 4), axis=2)
    return Blocks(numbers.reshape(rows, -1), scales.reshape(rows, -1), minima.reshape(rows, -1))


def _of_six_bits(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """packed: [rows, blocks, 12]. Returns the scales and the minima of the 8 groups, [rows, blocks, 8]. The first four
    have the low 6 bits of bytes 0 to 3 and 4 to 7; the others 4 bits in bytes 8 to 11, and the two above those of the
    first."""
    scales, minima, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    return (
        np.concatenate((scales & 63, rest & 15 | scales >> 6 << 4), axis=2),
        np.concatenate((minima & 63, rest >> 4 | minima >> 6 << 4), axis=2),
    )


def _product(factor: NDArray[np.float16], numbers: NDArray[np.uint8]) -> NDArray[np.float16]:
    return (factor.astype(np.float32) * numbers).astype(np.float16)


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
    return Blocks(numbers, scales, None)


def _slabs(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))
