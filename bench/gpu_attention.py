"""Attention of bench.gpu's part "kernels"."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench.gpu_report import EXACT_TOLERANCE, Row, Shape, Sizes, error_of, make_row, random_bf16
from bench.gpu_timing import Bounds, time_us
from bench.step_batch import attention_flops, causal_pairs
from executor_svc.attention.triton_paged import EXACT_PART
from executor_svc.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    even_split,
    fixed_split,
)
from executor_svc.kernels.prefill_attention import prefill_attention

BLOCK_SIZE = 16


class _Pages:
    """A cache of several layers, `batch` sequences of `context` tokens on blocks in no order."""

    def __init__(
        self, shape: Shape, batch: int, context: int, spread: int, device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        blocks = -(-context // BLOCK_SIZE)
        layer_bytes = 2 * dtype.itemsize * batch * blocks * BLOCK_SIZE * shape.kv_heads * shape.dim
        self.num_layers = max(1, min(1024, -(-spread // layer_bytes)))
        self.layer_bytes = 2 * dtype.itemsize * batch * context * shape.kv_heads * shape.dim
        self.data = torch.randn(
            self.num_layers, 2, batch * blocks, BLOCK_SIZE, shape.kv_heads, shape.dim, device=device
        ).to(dtype)  # fmt: skip
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
    for batch, context in sizes.decode:
        yield _decode(shape, batch, context, torch.bfloat16, sizes.spread_bytes, bounds, device)
    for batch, context in sizes.fixed:
        yield _decode(shape, batch, context, torch.float32, sizes.spread_bytes, bounds, device)


def _decode(
    shape: Shape, batch: int, context: int, dtype: torch.dtype, spread: int, bounds: Bounds, device: torch.device
) -> Row:
    """bfloat16: keys split evenly; float32: between fixed borders, where a row's bits must be those it has alone."""
    scale, is_fixed = shape.dim**-0.5, dtype is torch.float32
    pages = _Pages(shape, batch, context, spread, device, dtype)
    q, out = (torch.randn(batch, shape.heads, shape.dim, device=device).to(dtype) for _ in range(2))
    longest = max(context, 4096 if device.type == "cuda" else 4 * EXACT_PART)
    split = fixed_split(longest, EXACT_PART) if is_fixed else even_split(batch, shape.kv_heads, longest)
    workspace = DecodeWorkspace.make(batch, shape.heads, shape.dim, split, device)

    def attend(layer: int, count: int = batch) -> None:
        decode_attention(
            q[:count], pages.data[layer, 0], pages.data[layer, 1], pages.tables, pages.lengths, pages.rows[:count],
            out[:count], scale=scale, window=0, split=split, workspace=workspace,
        )  # fmt: skip

    dense = [pages.dense(layer, context) for layer in range(pages.num_layers)]
    attend(0)
    keys, values = (t.float() for t in dense[0])
    want = F.scaled_dot_product_attention(q.float()[:, :, None], keys, values, scale=scale, enable_gqa=True)
    error = error_of(out, want[:, :, 0])
    more: dict[str, bool] = {}
    if is_fixed:
        together = out[0].clone()
        attend(0, 1)
        more = {"right": error <= EXACT_TOLERANCE and torch.equal(out[0], together)}
    us = time_us([lambda i=i: attend(i) for i in range(pages.num_layers)])  # type: ignore[misc]
    torch_us = time_us(
        [
            lambda k=k, v=v: F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)  # type: ignore[misc]
            for k, v in dense
        ]
    )
    return make_row(
        "decode attention, exact" if is_fixed else "decode attention", shape, f"{batch} x {context}", us, torch_us,
        error, pages.layer_bytes / bounds.bytes_per_s * 1e6,
        tb_per_s=pages.layer_bytes / us / 1e6, parts=split.parts, **more,
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

        flops = attention_flops(shape.heads, shape.dim, chunks * causal_pairs(before, count))
        us = time_us([attend])
        yield make_row(
            "prefill attention", shape, f"{chunks} x {count} after {before}", us, time_us([library]), error,
            flops / bounds.flops_per_s * 1e6, tflop_per_s=flops / us / 1e6,
        )  # fmt: skip
