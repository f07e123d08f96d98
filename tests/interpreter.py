"""Triton's kernels without a GPU: its interpreter runs them on the CPU, once it is taught two things.

tests/conftest.py asks for the interpreter. Where there is a GPU the same tests run the compiled kernels on it.
"""

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")

_patch_tensor = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Loop bounds are arrays of one element, which NumPy 2.4 no longer turns into an int; Triton 3.6 relies on it."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot_of_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits and would multiply those."""
    return _dot(self, _widened(a), _widened(b), *rest)


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


interpreter._patch_lang_tensor = _patch_tensor_and_index
interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16
