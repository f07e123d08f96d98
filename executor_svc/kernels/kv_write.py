"""This step's keys and values into the paged cache; padding writes nowhere."""

import torch
import triton
import triton.language as tl

from executor_svc.kernels.early import await_previous, early_options


@triton.jit
def kv_write_kernel(
    k, v, slots, keys, values, k_stride, v_stride, num_slots,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See write_kv."""
    await_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    columns = tl.arange(0, BLOCK)
    is_written = (columns < WIDTH) & (slot >= 0) & (slot < num_slots)
    key = tl.load(k + token * k_stride + columns, mask=is_written)
    value = tl.load(v + token * v_stride + columns, mask=is_written)
    tl.store(keys + slot * WIDTH + columns, key, mask=is_written)
    tl.store(values + slot * WIDTH + columns, value, mask=is_written)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_slots: int,
) -> None:
    """keys[slots[t]] = k[t], values[slots[t]] = v[t] where 0 <= slots[t] < num_slots; other tokens write nowhere.

    k, v: [T, kv_heads, head_dim], the last two dimensions contiguous; keys, values: [.., kv_heads, head_dim] by slot,
    contiguous, the cache's own; slots: int64 [T], those that are written distinct. Launch: T programs.
    """
    width = k.shape[1] * k.shape[2]
    kv_write_kernel[(k.shape[0],)](
        k, v, slots, keys, values, k.stride(0), v.stride(0), num_slots,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
        **early_options(),
    )  # fmt: skip
