"""Paged causal attention of several chunks of prompts in one launch, each over its row's cached tokens and its own.

A program takes a tile of queries of one chunk, all query heads of one key/value head together, and goes through the
keys from the first one visible; keys visible to the whole tile need no mask. Which chunk a program is for, it finds by
itself: with tiles of Q queries, chunk i has those from first_i // Q + i on, so the launch has T // Q + C programs per
head and needs no table made for it. Source: arXiv 2205.14135, 2307.08691; tile numbers: Triton attention of vLLM.

With `split_tokens` the keys are summed in parts with borders at its multiples, joined from the first, as the decode
kernel does with fixed splits: a token's bits then depend neither on its chunk nor on whether it was decoded.
"""

import torch
import triton
import triton.language as tl

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


@triton.jit
def take_keys(
    accumulated, top, total, query, positions, low, high, begin, keys, values, table, dims, head, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) into the running softmax of queries at `positions`. Unmasked: all visible to all of them."""
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        is_there = at < high
        places = cache_places(table, at, is_there, head, KV_HEADS, DIM, BLOCK_SIZE)
        key = load_tile(keys, places, is_there, dims, DIM, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if MASKED:
            visible = is_there[None, :] & (at[None, :] <= positions[:, None])
            if WINDOW > 0:
                visible = visible & (at[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        value = load_tile(values, places, is_there, dims, DIM, MASKED)
        accumulated, top, total = take_tile(scores, value, accumulated, top, total)
    return accumulated, top, total


@triton.jit(do_not_specialize=["num_chunks"])
def prefill_kernel(
    q, keys, values, block_tables, rows, chunks, out, q_stride, table_stride, num_chunks, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See prefill_attention. M = Q * G rows: query r // G of the tile, member r % G of the group."""
    # The last tiles of a chunk have the most keys: they go first.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    chunk = number * 0
    beyond = chunk + num_chunks
    while beyond - chunk > 1:
        middle = (chunk + beyond) // 2
        is_before = tl.load(chunks + num_chunks + middle).to(tl.int32) // Q + middle <= number
        chunk = tl.where(is_before, middle, chunk)
        beyond = tl.where(is_before, beyond, middle)
    row = tl.load(rows + tl.load(chunks + chunk))
    first = tl.load(chunks + num_chunks + chunk).to(tl.int32)
    count = tl.load(chunks + 2 * num_chunks + chunk).to(tl.int32)
    offset = (number - first // Q - chunk) * Q
    start = tl.load(chunks + 3 * num_chunks + chunk).to(tl.int32) + offset
    live = tl.minimum(count - offset, Q)

    members = tl.arange(0, Q * G)
    queries, dims = members // G, tl.arange(0, D)
    is_real = ((queries < live) & (members % G < GROUP))[:, None] & (dims < DIM)[None, :]
    own = (head * GROUP + members % G)[:, None] * DIM + dims[None, :]
    tokens = (first + offset + queries).to(tl.int64)[:, None]
    query = tl.load(q + tokens * q_stride + own, mask=is_real, other=0.0)
    positions = start + queries
    # No keys for a tile behind its chunk, nor for padding.
    end = tl.where((live > 0) & (row >= 0), start + live, 0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + 1 - WINDOW, 0)
    low = begin // TILE * TILE
    table = block_tables + row * table_stride
    accumulated = tl.zeros([Q * G, D], tl.float32)
    top = tl.full([Q * G], LOWEST, tl.float32)
    total = tl.zeros([Q * G], tl.float32)
    if SPLIT_TOKENS > 0:
        for split in tl.range(low // SPLIT_TOKENS, tl.cdiv(end, SPLIT_TOKENS)):
            part, part_top, part_total = take_keys(
                tl.zeros([Q * G, D], tl.float32), tl.full([Q * G], LOWEST, tl.float32), tl.zeros([Q * G], tl.float32),
                query, positions, tl.maximum(split * SPLIT_TOKENS, low), tl.minimum((split + 1) * SPLIT_TOKENS, end),
                begin, keys, values, table, dims, head, scale,
                KV_HEADS, DIM, BLOCK_SIZE, WINDOW, True, TILE, STAGES,
            )  # fmt: skip
            accumulated, top, total = take_part(accumulated, top, total, part, part_top, part_total)
    else:
        visible_to_all = low
        if WINDOW == 0:
            visible_to_all = tl.minimum((start + 1) // TILE * TILE, end)
            accumulated, top, total = take_keys(
                accumulated, top, total, query, positions, 0, visible_to_all, begin,
                keys, values, table, dims, head, scale,
                KV_HEADS, DIM, BLOCK_SIZE, WINDOW, False, TILE, STAGES,
            )  # fmt: skip
        accumulated, top, total = take_keys(
            accumulated, top, total, query, positions, visible_to_all, end, begin,
            keys, values, table, dims, head, scale,
            KV_HEADS, DIM, BLOCK_SIZE, WINDOW, True, TILE, STAGES,
        )  # fmt: skip
    result = divided(accumulated, total).to(out.dtype.element_ty)
    tl.store(out + tokens * (KV_HEADS * GROUP * DIM) + own, result, mask=is_real)


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    chunks: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    split_tokens: int = 0,
) -> None:
    """Writes `out` at the chunks' tokens and nothing else; what the kernel reads stays as it is.

    q, out: [T, heads, head_dim], the last two dimensions contiguous, out wholly. keys, values: [blocks, block_size,
    kv_heads, head_dim], contiguous, this step's written. block_tables: int32 [num_rows, max_blocks]. rows: int64 [B],
    -1 for padding, whose output is 0. chunks: int64 [4, C], contiguous: place in `rows`, first token of T, count >= 1,
    first position in the row; first tokens rise. split_tokens: multiple of 64; 0: none.
    Launch: (T // Q + C, kv_heads) programs of Q queries.
    """
    heads, dim = q.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    padded_group = int(triton.next_power_of_2(group))
    matrix_rows = 128 if padded_dim(dim) * q.element_size() <= 256 else 64
    if split_tokens or q.dtype is torch.float32:
        matrix_rows = 16  # the decode kernel's, so that the products are its products; float32 has no matrix unit
    per_tile = max(1, matrix_rows // padded_group)
    num_chunks = chunks.shape[1]
    assert split_tokens % 64 == 0
    prefill_kernel[(q.shape[0] // per_tile + num_chunks, kv_heads)](
        q, keys, values, block_tables, rows, chunks, out,
        q.stride(0), block_tables.stride(0), num_chunks, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK_SIZE=block_size, WINDOW=window, SPLIT_TOKENS=split_tokens,
        Q=per_tile, G=max(padded_group, 16 // per_tile), D=padded_dim(dim), TILE=tile_keys(dim, q.dtype), STAGES=5,
        num_warps=8 if matrix_rows == 128 or (q.dtype is torch.float32 and not split_tokens) else 4,
    )  # fmt: skip
