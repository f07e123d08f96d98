"""Quantised rows that the gguf library can read but not make."""

import warnings
from functools import cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray


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
