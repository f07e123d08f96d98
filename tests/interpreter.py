"""Triton's kernels without a GPU: its interpreter runs them on the CPU, once it is taught three things.

tests/conftest.py asks for the interpreter. Where there is a GPU the same tests run the compiled kernels on it.
"""

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Loop bounds are arrays of one element, which NumPy 2.4 no longer turns into an int; Triton 3.6 relies on it."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot_in_order(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits and would multiply those. And it leaves the sums to a BLAS, which on
    some processors adds in another order where there are more rows; the order should be the kernels' alone."""
    left, right = (_widened(handle).astype(d.data.dtype) for handle in (a, b))
    return interpreter.TensorHandle(in_order(left, right) + d.data, d.dtype.scalar)


def in_order(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Their product. Each number of it is summed from the first to the last, whatever the shapes."""
    return np.asarray(np.einsum("...ik,...kj->...ij", np.ascontiguousarray(a), np.ascontiguousarray(b)))


def _widened(handle: Any) -> NDArray[Any]:
    assert handle.dtype.scalar.primitive_bitwidth > 8, "kept as its bits"
    data: NDArray[Any] = handle.data
    return (data.astype(np.uint32) << 16).view(np.float32) if handle.dtype.scalar is tl.bfloat16 else data


interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter.InterpreterBuilder.create_dot = _dot_in_order
