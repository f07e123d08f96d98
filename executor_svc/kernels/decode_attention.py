"""Paged attention of rows with one token each, split over the keys.

The query heads that share a key/value head are the rows of one matrix product, so keys are read once. With few rows the
keys of each are split between several programs, and a second kernel joins the parts. The number of programs hangs on
the batch and on the longest context possible, never on the lengths there are: each program reads its row's length on
the device, so a captured graph stays valid while sequences grow. Source: arXiv 2205.14135, and flash-decoding
(Dao, Haziza, Massa, Sizov, 2023).

Two ways to split. *Even*: the keys there are, shared evenly; quickest. *Fixed*: borders at multiples of `split_tokens`
from the sequence's start, parts joined one after the other from the first; a row's bits then hang on its own keys
alone, whatever the batch, the bucket or the longest context.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_svc.kernels.early import await_previous, early_options
from executor_svc.kernels.tiles import (
    LOG2_E,
    LOWEST,
    cache_places,
    divided,
    load_tile,
    padded_dim,
    take_part,
    take_tile,
    tile_keys,
)

# Programs at most: four for each of 132 multiprocessors, of which three fit at once.
_PROGRAMS = 528
_MAX_SPLITS = 32


@triton.jit(do_not_specialize=["num_parts"])
def decode_kernel(
    q, keys, values, block_tables, lengths, rows, index, out, parts, stats,
    q_stride, table_stride, num_parts, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr, SPLIT_TOKENS: tl.constexpr, HAS_INDEX: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See decode_attention."""
    await_previous(EARLY)
    head, split, at = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + at)
    token = at
    if HAS_INDEX:
        token = tl.load(index + at)
    length = tl.load(lengths + row, mask=row >= 0, other=0).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    if SPLIT_TOKENS > 0:
        low = tl.maximum(split * SPLIT_TOKENS, begin // TILE * TILE)
        high = tl.minimum((split + 1) * SPLIT_TOKENS, length)
    else:
        first = begin // TILE
        share = tl.cdiv(tl.cdiv(length, TILE) - first, num_parts) * TILE
        low = first * TILE + split * share
        high = tl.minimum(low + share, length)

    group, dims = tl.arange(0, M), tl.arange(0, D)
    is_real = (group < GROUP)[:, None] & (dims < DIM)[None, :]
    own = (head * GROUP + group)[:, None] * DIM + dims[None, :]
    query = tl.load(q + token.to(tl.int64) * q_stride + own, mask=is_real, other=0.0)
    table = block_tables + row * table_stride
    accumulated = tl.zeros([M, D], tl.float32)
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        positions = start + tl.arange(0, TILE)
        is_there = positions < high
        places = cache_places(table, positions, is_there, head, KV_HEADS, DIM, BLOCK_SIZE)
        key = load_tile(keys, places, is_there, dims, DIM, True)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        visible = is_there
        if WINDOW > 0:
            visible = is_there & (positions >= begin)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        value = load_tile(values, places, is_there, dims, DIM, True)
        accumulated, top, total = take_tile(scores, value, accumulated, top, total)

    if IS_SPLIT:
        part = (at.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + group) * num_parts + split
        tl.store(stats + part * 2, top, mask=group < GROUP)
        tl.store(stats + part * 2 + 1, total, mask=group < GROUP)
        # An empty part has no sum; nobody reads one.
        tl.store(parts + part[:, None] * DIM + dims[None, :], accumulated, mask=is_real & (low < high))
    else:
        result = divided(accumulated, total)
        place = out + token.to(tl.int64) * (KV_HEADS * GROUP * DIM) + own
        tl.store(place, result.to(out.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_parts"])
def join_kernel(
    out, parts, stats, index, num_parts,
    HEADS: tl.constexpr, DIM: tl.constexpr, FIXED: tl.constexpr, HAS_INDEX: tl.constexpr,
    D: tl.constexpr, MAX_PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See decode_attention. MAX_PARTS: of an even split."""
    await_previous(EARLY)
    head, at = tl.program_id(0), tl.program_id(1)
    token = at
    if HAS_INDEX:
        token = tl.load(index + at)
    dims = tl.arange(0, D)
    first = (at.to(tl.int64) * HEADS + head) * num_parts
    if FIXED:
        accumulated = tl.zeros([1, D], tl.float32)
        top = tl.full([1], LOWEST, tl.float32)
        total = tl.zeros([1], tl.float32)
        one = tl.arange(0, 1)
        for split in tl.range(0, num_parts):
            part_total = tl.load(stats + (first + split) * 2 + 1 + one)
            part_top = tl.load(stats + (first + split) * 2 + one)
            is_read = (part_total != 0)[:, None] & (dims < DIM)[None, :]
            part = tl.load(parts + (first + split) * DIM + dims[None, :], mask=is_read, other=0.0)
            accumulated, top, total = take_part(accumulated, top, total, part, part_top, part_total)
        result = divided(accumulated, total)
    else:
        splits = tl.arange(0, MAX_PARTS)
        totals = tl.load(stats + (first + splits) * 2 + 1, mask=splits < num_parts, other=0.0)
        tops = tl.load(stats + (first + splits) * 2, mask=splits < num_parts, other=LOWEST)
        is_read = (totals != 0)[:, None] & (dims < DIM)[None, :]
        sums = tl.load(parts + (first + splits)[:, None] * DIM + dims[None, :], mask=is_read, other=0.0)
        weights = tl.exp2(tops - tl.max(tops, 0))
        accumulated = tl.sum(sums * weights[:, None], 0)
        total = tl.sum(totals * weights, 0)
        result = (accumulated / tl.where(total == 0, 1.0, total))[None, :]
    place = out + (token.to(tl.int64) * HEADS + head) * DIM + dims[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=(dims < DIM)[None, :])


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """Into how many parts the keys of a row go. tokens: between fixed borders; 0: an even share."""

    parts: int
    tokens: int = 0


def even_split(batch: int, kv_heads: int, max_length: int) -> DecodeSplit:
    """Enough programs for a large GPU, but no parts of fewer than 128 keys where a sequence is at its longest.

    The batch alone decides: `max_length` is what a row can ever hold.
    """
    parts = 1
    while parts < _MAX_SPLITS and 2 * parts * batch * kv_heads <= _PROGRAMS and 256 * parts <= max_length:
        parts *= 2
    return DecodeSplit(parts)


def fixed_split(max_length: int, tokens: int) -> DecodeSplit:
    """Borders each `tokens` positions, a multiple of 64."""
    return DecodeSplit(max(1, -(-max_length // tokens)), tokens)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Parts between the two kernels: float32 [batch, heads, parts, head_dim] and [batch, heads, parts, 2].

    Written and read within one call of `decode_attention`; calls in one stream may share it. Empty with one part.
    """

    parts: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def make(cls, batch: int, heads: int, dim: int, split: DecodeSplit, device: torch.device) -> "DecodeWorkspace":
        count = batch * heads * split.parts if split.parts > 1 else 0
        return cls(
            torch.empty(count * dim, dtype=torch.float32, device=device),
            torch.empty(count * 2, dtype=torch.float32, device=device),
        )


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    split: DecodeSplit,
    workspace: DecodeWorkspace,
    index: torch.Tensor | None = None,
) -> None:
    """Writes out[index[b]] for each b, and nothing else; what the kernel reads stays as it is.

    q, out: [T, heads, head_dim], the last two dimensions contiguous, out wholly. keys, values: [blocks, block_size,
    kv_heads, head_dim], contiguous. block_tables: int32 [num_rows, max_blocks]; lengths: int64 [num_rows], tokens
    attended to. rows: int64 [B], -1 for padding, whose output is 0. index: int64 [B], places in q and out; None: b.
    No row is longer than the split was made for. Launch: (kv_heads, parts, B) programs, and (heads, B) to join parts.
    """
    batch = rows.shape[0]
    heads, dim = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    padded = padded_dim(dim)
    assert split.tokens % 64 == 0
    decode_kernel[(kv_heads, split.parts, batch)](
        q, keys, values, block_tables, lengths, rows, rows if index is None else index, out,
        workspace.parts, workspace.stats,
        q.stride(0), block_tables.stride(0), split.parts, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK_SIZE=block_size, WINDOW=window,
        IS_SPLIT=split.parts > 1, SPLIT_TOKENS=split.tokens, HAS_INDEX=index is not None,
        M=max(16, triton.next_power_of_2(group)), D=padded, TILE=tile_keys(dim, q.dtype), STAGES=5, num_warps=4,
        **early_options(),
    )  # fmt: skip
    if split.parts > 1:
        join_kernel[(heads, batch)](
            out, workspace.parts, workspace.stats, rows if index is None else index, split.parts,
            HEADS=heads, DIM=dim, FIXED=split.tokens > 0, HAS_INDEX=index is not None,
            D=padded, MAX_PARTS=_MAX_SPLITS, num_warps=4,
            **early_options(),
        )  # fmt: skip
