"""RMS norm, alone or behind a residual addition, in one pass over the row. Source: arXiv 1910.07467."""

import torch
import triton
import triton.language as tl

from executor_svc.kernels.early import await_previous, early_options


@triton.jit
def norm_kernel(
    x, residual, weight, out, x_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See rms_norm and add_rms_norm."""
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_there = columns < WIDTH
    value = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0)
    if HAS_RESIDUAL:
        place = residual + row * WIDTH + columns
        # Rounded as the sum is when it is stored: the norm is the stored value's.
        value = (value.to(tl.float32) + tl.load(place, mask=is_there, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(place, value, mask=is_there)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = wide * factor * tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, scaled.to(out.dtype.element_ty), mask=is_there)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [T, width], rows contiguous; weight: [width]. Returns a new [T, width]. Launch: T programs."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x, in place; returns the norm of it, new. All [T, width]; residual contiguous. Launch: T programs."""
    return _launch(x, residual, weight, eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_tokens, width = x.shape
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    # An element for each thread at least. What several threads hold, one stores, and nothing makes it wait until the
    # others have read the residual in the same place.
    block = max(block, 32 * warps)
    if num_tokens:
        norm_kernel[(num_tokens,)](
            x, x if residual is None else residual, weight, out, x.stride(0), eps,
            WIDTH=width, BLOCK=block, HAS_RESIDUAL=residual is not None, num_warps=warps,
            **early_options(),
        )  # fmt: skip
    return out
