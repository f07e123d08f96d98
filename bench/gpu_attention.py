"""Attention of bench.gpu's part "kernels"."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench.gpu_report import Row, Shape, Sizes, error_of, make_row, random_bf16
from bench.gpu_timing import Bounds, time_us
from executor_svc.kernels.decode_attention import DecodeSplit, DecodeWorkspace, decode_attention, even_split
from executor_svc.kernels.prefill_attention import prefill_attention

BLOCK_SIZE = 16


class _Pages:
    """A cache of several layers, `batch` sequences of `context` tokens on blocks in no order."""

    def __init__(self, shape: Shape, batch: int, context: int, spread: int, device: torch.device) -> None:
        blocks = -(-context // BLOCK_SIZE)
        layer_bytes = 4 * batch * blocks * BLOCK_SIZE * shape.kv_heads * shape.dim
        self.num_layers = max(1, min(1024, -(-spread // layer_bytes)))
        self.layer_bytes = 4 * batch * context * shape.kv_heads * shape.dim
        self.data = random_bf16(
            self.num_layers, 2, batch * blocks, BLOCK_SIZE, shape.kv_heads, shape.dim, device=device
        )  # fmt: skip
        self.tables = torch.randperm(batch * blocks, device=device).view(batch, blocks).to(torch.int32)
        self.lengths = torch.full((batch,), context, dtype=torch.int64, device=device)
        self.rows = torch.arange(batch, device=device)

    def dense(self, layer: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, kv_heads, context, dim] each, contiguous."""
        keys, values = (
            part[self.tables.long()].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()
            for part in self.data[layer]
        )
        return keys, values


def decode(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    scale = shape.dim**-0.5
    for batch, context in sizes.decode:
        pages = _Pages(shape, batch, context, sizes.spread_bytes, device)
        q, out = (random_bf16(batch, shape.heads, shape.dim, device=device) for _ in range(2))
        split = even_split(batch, shape.kv_heads, max(context, 4096))
        workspace = DecodeWorkspace.make(batch, shape.heads, shape.dim, split, device)

        def attend(layer: int, pages: _Pages = pages, split: DecodeSplit = split, q: torch.Tensor = q,
                   out: torch.Tensor = out, workspace: DecodeWorkspace = workspace) -> None:  # fmt: skip
            decode_attention(
                q, pages.data[layer, 0], pages.data[layer, 1], pages.tables, pages.lengths, pages.rows, out,
                scale=scale, window=0, split=split, workspace=workspace,
            )  # fmt: skip

        dense = [pages.dense(layer, context) for layer in range(pages.num_layers)]
        attend(0)
        keys, values = (t.float() for t in dense[0])
        want = F.scaled_dot_product_attention(q.float()[:, :, None], keys, values, scale=scale, enable_gqa=True)
        error = error_of(out, want[:, :, 0])
        us = time_us([lambda i=i: attend(i) for i in range(pages.num_layers)])  # type: ignore[misc]
        torch_us = time_us(
            [
                lambda k=k, v=v, q=q: F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)  # type: ignore[misc]
                for k, v in dense
            ]
        )
        bound = pages.layer_bytes / bounds.bytes_per_s * 1e6
        yield make_row(
            "decode attention", shape, f"{batch} x {context}", us, torch_us, error, bound,
            tb_per_s=pages.layer_bytes / us / 1e6, parts=split.parts,
        )  # fmt: skip


def prefill(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    scale = shape.dim**-0.5
    for chunks, count, before in sizes.prefill:
        total = before + count
        pages = _Pages(shape, chunks, total, 0, device)
        q, out = (random_bf16(chunks * count, shape.heads, shape.dim, device=device) for _ in range(2))
        columns = torch.tensor(
            [list(range(chunks)), [n * count for n in range(chunks)], [count] * chunks, [before] * chunks],
            device=device,
        )

        def attend(pages: _Pages = pages, q: torch.Tensor = q, out: torch.Tensor = out,
                   columns: torch.Tensor = columns) -> None:  # fmt: skip
            prefill_attention(
                q, pages.data[0, 0], pages.data[0, 1], pages.tables, pages.rows, columns, out, scale=scale, window=0
            )

        attend()
        keys, values = pages.dense(0, total)
        own = q.view(chunks, count, shape.heads, shape.dim).transpose(1, 2)
        seen = torch.ones(count, total, dtype=torch.bool, device=device).tril(before)
        want = F.scaled_dot_product_attention(
            own.float(), keys.float(), values.float(), attn_mask=seen, scale=scale, enable_gqa=True
        )
        error = error_of(out.view(chunks, count, shape.heads, shape.dim), want.transpose(1, 2))

        def library(own: torch.Tensor = own, keys: torch.Tensor = keys, values: torch.Tensor = values,
                    seen: torch.Tensor | None = seen if before else None) -> None:  # fmt: skip
            F.scaled_dot_product_attention(
                own, keys, values, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
            )

        flops = 4.0 * chunks * shape.heads * shape.dim * (count * before + count * (count + 1) / 2)
        us = time_us([attend])
        yield make_row(
            "prefill attention", shape, f"{chunks} x {count} after {before}", us, time_us([library]), error,
            flops / bounds.flops_per_s * 1e6, tflop_per_s=flops / us / 1e6,
        )  # fmt: skip
