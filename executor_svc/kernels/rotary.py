"""From the projection of a step's tokens to what attention reads: heads normalised where the model does so, queries and
keys rotated, keys and values written into the paged cache. One pass; padding writes nowhere but its queries.

Source: arXiv 2104.09864, in the form that pairs dimension i with i + head_dim / 2.
"""

import torch
import triton
import triton.language as tl

from executor_svc.kernels.early import await_previous, early_options

# Heads of one program.
_HEADS = 8


@triton.jit
def rotary_kernel(
    qkv, positions, table, slots, q_weight, k_weight, q, keys, values, qkv_stride, num_slots, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See rotate_and_write. A head is two halves, [BLOCK, D] each; values go through untouched."""
    await_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, D)
    is_key = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    is_value = (heads >= HEADS + KV_HEADS) & (heads < HEADS + 2 * KV_HEADS)
    in_half = (dims < HALF)[None, :]
    is_there = (heads < HEADS + 2 * KV_HEADS)[:, None] & in_half
    place = qkv + token * qkv_stride + heads[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=is_there, other=0.0).to(tl.float32)
    turned_low, turned_high = low, high
    if HAS_NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        factor = tl.rsqrt(mean + eps)[:, None]
        weight = tl.where(is_key[:, None], k_weight, q_weight) + dims[None, :]
        turned_low = low * factor * tl.load(weight, mask=is_there, other=0.0).to(tl.float32)
        turned_high = high * factor * tl.load(weight + HALF, mask=is_there, other=0.0).to(tl.float32)
    row = table + tl.load(positions + token) * (2 * HALF) + dims
    cos = tl.load(row, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    rotated_low = turned_low * cos - turned_high * sin
    rotated_high = turned_high * cos + turned_low * sin
    low = tl.where(is_value[:, None], low, rotated_low).to(q.dtype.element_ty)
    high = tl.where(is_value[:, None], high, rotated_high).to(q.dtype.element_ty)

    is_query = (heads < HEADS)[:, None] & in_half
    place = q + (token * HEADS + heads[:, None]) * (2 * HALF) + dims[None, :]
    tl.store(place, low, mask=is_query)
    tl.store(place + HALF, high, mask=is_query)
    slot = tl.load(slots + token)
    is_written = (slot >= 0) & (slot < num_slots)
    place = (slot * KV_HEADS + heads[:, None] - HEADS) * (2 * HALF) + dims[None, :]
    tl.store(keys + place, low, mask=is_key[:, None] & in_half & is_written)
    tl.store(keys + place + HALF, high, mask=is_key[:, None] & in_half & is_written)
    place -= KV_HEADS * (2 * HALF)
    tl.store(values + place, low, mask=is_value[:, None] & in_half & is_written)
    tl.store(values + place + HALF, high, mask=is_value[:, None] & in_half & is_written)


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_slots: int,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Returns the rotated queries, new [T, heads, head_dim]; keys and values go where `slots` says, as in write_kv.

    qkv: [T, heads + 2 kv_heads, head_dim], the last two dimensions contiguous. positions: int64 [T]. table:
    [max_positions, 2, head_dim / 2], cosines and sines, contiguous. slots: int64 [T]; those outside [0, num_slots) are
    written nowhere. keys, values: [slots, kv_heads, head_dim], contiguous. norms: RMS norm weights [head_dim] of
    queries and keys. Launch: (T, all heads / 8) programs.
    """
    num_tokens, all_heads, dim = qkv.shape
    kv_heads = keys.shape[-2]
    heads = all_heads - 2 * kv_heads
    q = torch.empty(num_tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight = norms or (table, table)
    if num_tokens:
        rotary_kernel[(num_tokens, -(-all_heads // _HEADS))](
            qkv, positions, table, slots, q_weight, k_weight, q, keys, values, qkv.stride(0), num_slots, eps,
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, HAS_NORM=norms is not None,
            BLOCK=_HEADS, D=triton.next_power_of_2(dim // 2), num_warps=2,
            **early_options(),
        )  # fmt: skip
    return q
