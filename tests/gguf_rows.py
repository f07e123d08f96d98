"""Quantised weights that the gguf library can read but not make."""

import warnings
from functools import cache
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from executor_svc.kernels_cpu.packing import Blocks, Format, quantise


def random_rows(
    kind: GGMLQuantizationType, rows: int, depth: int, *, least: float = 1e-3, most: float = 10.0
) -> NDArray[np.uint8]:
    """Random bytes [rows, bytes of a row of `depth` weights], of those blocks whose largest weight lies in between."""
    found = _blocks(kind, least, most)
    chosen = np.random.default_rng(rows).integers(len(found), size=rows * depth // GGML_QUANT_SIZES[kind][0])
    out: NDArray[np.uint8] = found[chosen].reshape(rows, -1)
    return out


@cache
def _blocks(kind: GGMLQuantizationType, least: float, most: float) -> NDArray[np.uint8]:
    raw = np.random.default_rng(kind.value).integers(0, 256, (8192, GGML_QUANT_SIZES[kind][1]), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # some mean infinities
        largest = np.abs(dequantize(raw, kind)).max(axis=1)
    found: NDArray[np.uint8] = raw[(largest > least) & (largest < most)]
    return found


def quantised(values: NDArray[np.float32], wanted: Format) -> Blocks:
    """`values` [rows, depth] in any format but DENSE: numbers near them, if not the best there are."""
    if wanted in (Format.INT8, Format.INT4):
        return quantise(values, wanted)
    rows, depth = values.shape

    def flat(array: NDArray[Any]) -> NDArray[Any]:
        return array.reshape(rows, -1)

    if wanted is Format.INT4_0:
        own = values.reshape(rows, -1, 32)
        steps = (np.abs(own).max(axis=2) / 7).astype(np.float16)
        return Blocks(wanted, flat(np.rint(own / steps[..., None]).clip(-8, 7) + 8).astype(np.uint8), steps)

    def multiples(sizes: NDArray[np.float32], most: int) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
        factors = (sizes.max(axis=2, keepdims=True) / most).astype(np.float16)
        return factors, np.rint(sizes / factors).astype(np.int8)

    groups = values.reshape(rows, depth // 256, -1, 16 if wanted is Format.INT6_K else 32)
    if wanted is Format.INT6_K:
        factor, scales = multiples(np.abs(groups).max(axis=3) / 31, 127)
        numbers = np.rint(groups / (factor * scales.astype(np.float32))[..., None]).clip(-32, 31) + 32
        return Blocks(wanted, flat(numbers).astype(np.uint8), flat(scales), factors=factor)
    most = 15 if wanted is Format.INT4_K else 31
    least = np.minimum(groups.min(axis=3), 0)
    factor, scales = multiples((groups.max(axis=3) - least) / most, 63)
    minimum, minima = multiples(-least, 63)
    moved = groups + (minimum * minima.astype(np.float32))[..., None]
    numbers = np.rint(moved / (factor * scales.astype(np.float32))[..., None]).clip(0, most)
    factors = np.concatenate((factor, -minimum), axis=2)
    return Blocks(wanted, flat(numbers).astype(np.uint8), flat(scales), flat(minima), factors)
