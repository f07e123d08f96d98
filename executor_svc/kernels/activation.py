"""silu(gate) * up of a projection that made both, in one pass."""

import torch
import triton
import triton.language as tl

from executor_svc.kernels.early import await_previous, early_options

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """See silu_mul."""
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < WIDTH
    gate = tl.load(gate_up + row * stride + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_there)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2 * width], rows contiguous. Returns a new [T, width]. Launch: (T, width / 1024) programs."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        silu_mul_kernel[(num_tokens, -(-width // _BLOCK))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=_BLOCK, num_warps=4, **early_options()
        )
    return out
