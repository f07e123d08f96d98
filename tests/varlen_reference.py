"""What torch's varlen_attn is taken to mean, for machines without CUDA: the same signature, float32, one sequence after
the other. tests/gpu holds it against torch's own."""

import torch


def varlen_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """query: [T, heads, dim]; key, value: pages [pages, page, kv_heads, dim]. Returns [T, heads, dim]."""
    assert seqused_k is not None and block_table is not None and enable_gqa and num_splits == 1
    for told in (cu_seq_q, seqused_k, block_table, *([] if cu_seq_k is None else [cu_seq_k])):
        assert told.dtype is torch.int32 and told.is_contiguous()
    assert query.stride(-1) == 1 and window_size[1] == 0
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    group = query.shape[1] // key.shape[2]
    ends, used = cu_seq_q.tolist(), seqused_k.tolist()
    assert ends[0] == 0 and ends[-1] == query.shape[0] and max(used) <= max_k
    if cu_seq_k is not None:
        assert cu_seq_k.diff().tolist() == used
    for sequence, (first, end, length) in enumerate(zip(ends, ends[1:], used, strict=False)):
        assert end - first <= max_q
        pages = block_table[sequence, : -(-length // key.shape[1])].long()
        keys, values = (
            pool.index_select(0, pages).flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for pool in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), keys) * (scale or query.shape[-1] ** -0.5)
        # Bottom right: the last query sees the last key.
        positions = torch.arange(length - (end - first), length, device=query.device)[:, None]
        places = torch.arange(length, device=query.device)
        hidden = places > positions
        if window_size[0] >= 0:
            hidden |= places < positions - window_size[0]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out
