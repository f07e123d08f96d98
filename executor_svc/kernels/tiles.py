"""What the attention kernels share: tiles of keys and values out of the paged cache, and a softmax kept as it goes.

Scores are in units of log2, so that weights are powers of two. A running softmax is (accumulated, top, total): the
values' sum weighted by 2^(score - top), the largest score, the weights' sum. Source: arXiv 1805.02867, 2205.14135.
"""

import torch
import triton
import triton.language as tl

# The top of a softmax over nothing: finite, so that a difference of two tops is no NaN.
LOWEST = tl.constexpr(-1.0e30)
LOG2_E = 1.4426950408889634


def padded_dim(head_dim: int) -> int:
    """Columns a tile has for a head: a power of two that the matrix units take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def tile_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys in one tile, so that two of keys and two of values fit a third of a multiprocessor."""
    return 64 if padded_dim(head_dim) * dtype.itemsize <= 256 else 32


@triton.jit
def cache_places(
    table, positions, is_there, head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Elements of a layer's keys (and values) where `positions` of one sequence begin, int64, shaped as positions.

    table: pointer to the row's int32 blocks. Positions that are not there read no table entry; their place is 0.
    """
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
    return (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * (KV_HEADS * DIM) + head * DIM


@triton.jit
def load_tile(cache, places, is_there, dims, DIM: tl.constexpr, MASKED: tl.constexpr):
    """[tile, D] of keys or values. Zero where not there (what lies in a stale slot may not be finite)."""
    pointers = cache + places[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=is_there[:, None] & (dims < DIM)[None, :], other=0.0)
    return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def take_tile(scores, values, accumulated, top, total):
    """The running softmax with one more tile. scores: float32 [M, tile], -inf where hidden; values: [tile, D]."""
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    accumulated = tl.dot(weights.to(values.dtype), values, accumulated * shrink[:, None], input_precision="ieee")
    return accumulated, higher, total


@triton.jit
def take_part(accumulated, top, total, part, part_top, part_total):
    """The running softmax [M, D] with a part of the keys that was summed apart; adding an empty part changes no bit."""
    higher = tl.maximum(top, part_top)
    shrink, part_shrink = tl.exp2(top - higher), tl.exp2(part_top - higher)
    accumulated = accumulated * shrink[:, None] + part * part_shrink[:, None]
    return accumulated, higher, total * shrink + part_total * part_shrink


@triton.jit
def divided(accumulated, total):
    """The result of a running softmax [M, D]; zero where there was no key. NaN stays NaN."""
    return accumulated / tl.where(total == 0, 1.0, total)[:, None]
