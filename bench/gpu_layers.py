"""The kernels of bench.gpu in the company they are served in: whole layers of a decode step, launched early or not."""

from collections.abc import Iterator
from typing import Final

import torch

from bench.gpu_report import Row, Shape, Sizes, make_row
from bench.gpu_timing import Bounds, time_us
from executor_svc.attention.layout import AttentionShape, DecodePart, RowTables, StepLayout
from executor_svc.attention.triton_paged import TritonAttention
from executor_svc.kernels.early import launch_early
from executor_svc.kv_cache import KvCache, KvShape
from executor_svc.loader.load import load_weights
from executor_svc.loader.random import RandomSource
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.triton_ops import TritonOps

LAYERS: Final = 8
VOCAB: Final = 1024  # no part of what is timed
BLOCK_SIZE: Final = 16


def layers(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    """`torch_us` is the same without early launches; `error` whether a bit differs: it must not."""
    on_device = device.type == "cuda"
    num_layers = LAYERS if on_device else 1
    config = ModelConfig(
        "llama", VOCAB, shape.hidden, shape.intermediate, num_layers, shape.heads, shape.kv_heads, shape.dim, 4096,
        (0,) * num_layers,
    )  # fmt: skip
    weights = load_weights(config, RandomSource(device, 0.02), dtype=torch.bfloat16, device=device)
    ops = TritonOps()
    model = Decoder(config, weights, ops)
    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if on_device:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ops.settle(matrices)
        torch.cuda.synchronize()
    backend = TritonAttention(AttentionShape(shape.heads, shape.kv_heads, shape.dim, config.windows), exact=False)
    for batch in sizes.rows:
        context = 384 if on_device else 20
        blocks = -(-context // BLOCK_SIZE)
        cache = KvCache(
            KvShape(num_layers, shape.kv_heads, shape.dim, BLOCK_SIZE, torch.bfloat16), batch * blocks,
            lambda size, dtype: torch.randn(size, device=device).to(dtype),
        )  # fmt: skip
        rows = torch.arange(batch, device=device)
        tables = RowTables(
            torch.randperm(batch * blocks, device=device).view(batch, blocks).to(torch.int32),
            torch.full((batch,), context, dtype=torch.int64, device=device), BLOCK_SIZE,
        )  # fmt: skip
        last = torch.full((batch,), context - 1, dtype=torch.int64, device=device)
        slots = tables.block_tables[:, -1].to(torch.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        layout = StepLayout(slots, tables, DecodePart(None, rows, context), (), None)

        def forward(cache: KvCache = cache, layout: StepLayout = layout, tokens: torch.Tensor = rows,
                    last: torch.Tensor = last) -> torch.Tensor:  # fmt: skip
            return model.forward(tokens, last, backend.begin(cache, layout))

        plain_us, plain = time_us([forward], least_calls=4), forward()
        launch_early(on_device)  # the interpreter knows nothing of it
        try:
            us, early = time_us([forward], least_calls=4), forward()
        finally:
            launch_early(False)
        size = sum(m.numel() for m in matrices) * 2 + batch * context * shape.kv_heads * shape.dim * 4 * num_layers
        yield make_row(
            "layers, launched early", shape, f"{num_layers} of {batch} rows x {context}", us, plain_us,
            float(not torch.equal(plain, early)), size / bounds.bytes_per_s * 1e6,
            tb_per_s=size / us / 1e6, torch_tb_per_s=size / plain_us / 1e6,
        )  # fmt: skip
