"""Products of few rows with a weight matrix: every weight is read once, with as many bytes in flight as fit.

A program takes some of the weight's rows and goes along the inner dimension; with few weight rows the inner dimension
is split too, and a second kernel adds the parts in their order, so the bits do not depend on who finished first. All
counts up to 16 rows run the same instructions: the matrix units take 16 rows anyway.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_svc.kernels.early import await_previous, early_options, prefetch_lines

MAX_ROWS = 16


@triton.jit
def _prefetch(weight, outs, num_out, inner, low, high, LINES: tl.constexpr):
    """The first LINES cache lines of each weight row of the program: weights are there before any kernel runs."""
    size: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.minimum(low + tl.arange(0, LINES) * size, high - 1)
    rows = tl.minimum(outs, num_out - 1).to(tl.int64)
    prefetch_lines(weight + rows[:, None] * inner + tl.maximum(columns, 0)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def skinny_kernel(
    x, weight, out, num_rows, num_out, inner, x_stride, out_stride,
    PARTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """out: [PARTS, num_rows, num_out] in float32 where PARTS > 1. See skinny_linear."""
    outs = tl.program_id(0) * N + tl.arange(0, N)
    part = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    share = tl.cdiv(tl.cdiv(inner, K), PARTS) * K
    low = part * share
    high = tl.minimum(low + share, inner)
    weights = weight + outs.to(tl.int64)[:, None] * inner
    if EARLY:
        _prefetch(weight, outs, num_out, inner, low, high, LINES)
    await_previous(EARLY)
    total = tl.zeros([ROWS, N], tl.float32)
    for start in tl.range(low, high, K, num_stages=STAGES):
        columns = start + tl.arange(0, K)
        is_there = columns < high
        tile = tl.load(
            weights + columns[None, :], mask=(outs < num_out)[:, None] & is_there[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        own = tl.load(
            x + rows[:, None] * x_stride + columns[None, :],
            mask=(rows < num_rows)[:, None] & is_there[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(own, tl.trans(tile), total, input_precision="ieee")
    is_real = (rows < num_rows)[:, None] & (outs < num_out)[None, :]
    place = out + (part * num_rows + rows[:, None]).to(tl.int64) * out_stride + outs[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    parts, out, num_rows, num_out, PARTS: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """out = the sum over PARTS, from the first on."""
    await_previous(EARLY)
    row = tl.program_id(1).to(tl.int64)
    outs = tl.program_id(0) * N + tl.arange(0, N)
    is_there = outs < num_out
    total = tl.zeros([N], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * num_rows + row) * num_out + outs, mask=is_there, other=0.0)
    tl.store(out + row * num_out + outs, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def vector_kernel(
    x, weight, out, num_out, inner, N: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """One row, without the matrix units: weights go from memory to registers in pieces of 16 bytes, [N, K] at a time,
    and are summed across threads once, at the end. See skinny_linear."""
    outs = tl.program_id(0) * N + tl.arange(0, N)
    if EARLY:
        _prefetch(weight, outs, num_out, inner, 0, inner, LINES)
    await_previous(EARLY)
    weights = weight + outs.to(tl.int64)[:, None] * inner
    total = tl.zeros([N, K], tl.float32)
    for start in tl.range(0, inner, K, loop_unroll_factor=2):
        columns = start + tl.arange(0, K)
        is_there = columns < inner
        tile = tl.load(
            weights + columns[None, :], mask=(outs < num_out)[:, None] & is_there[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        own = tl.load(x + columns, mask=is_there, other=0.0)
        total += tile.to(tl.float32) * own.to(tl.float32)[None, :]
    tl.store(out + outs, tl.sum(total, 1).to(out.dtype.element_ty), mask=outs < num_out)


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """outs: weight rows of a program; inner: columns of a tile; parts: of the inner dimension; is_vector: for one row,
    without matrix units, parts and stages."""

    outs: int
    inner: int
    parts: int
    stages: int
    warps: int
    is_vector: bool = False

    @property
    def lines(self) -> int:
        """Cache lines of each weight row to ask for early, of half precision: about the tiles in flight later."""
        return max(1, min(32, self.inner * max(1, self.stages - 1) // 64 // 2))


# What is worth measuring; TritonOps takes the quickest for each shape.
CANDIDATES = (
    SkinnyConfig(16, 512, 1, 4, 4),
    SkinnyConfig(32, 256, 1, 5, 4),
    SkinnyConfig(64, 128, 1, 5, 4),
    SkinnyConfig(16, 512, 2, 4, 4),
    SkinnyConfig(32, 256, 4, 4, 4),
    SkinnyConfig(64, 256, 1, 3, 8),
)
# For one row.
VECTOR_CANDIDATES = (
    SkinnyConfig(4, 1024, 1, 1, 4, is_vector=True),
    SkinnyConfig(8, 512, 1, 1, 4, is_vector=True),
    SkinnyConfig(2, 2048, 1, 1, 4, is_vector=True),
)


def candidates_for(num_rows: int) -> tuple[SkinnyConfig, ...]:
    return (*CANDIDATES, *VECTOR_CANDIDATES) if num_rows == 1 else CANDIDATES


def config_for(num_out: int, inner: int) -> SkinnyConfig:
    """Without a measurement: the largest tiles that still give each of 132 multiprocessors two programs."""
    for config in (CANDIDATES[2], CANDIDATES[1], CANDIDATES[0]):
        if num_out // config.outs >= 264:
            return config
    return CANDIDATES[3] if inner >= 4096 else CANDIDATES[0]


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, config: SkinnyConfig) -> torch.Tensor:
    """x: [T, inner], T <= 16, rows contiguous; weight: [out, inner], contiguous. Returns a new [T, out] in x's dtype.

    With config.is_vector T is 1. Launch: (out / config.outs, parts) programs; with parts, (out / 1024, T) more.
    """
    num_rows, inner = x.shape
    num_out = weight.shape[0]
    assert num_rows <= MAX_ROWS
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    if config.is_vector:
        assert num_rows == 1
        vector_kernel[(-(-num_out // config.outs),)](
            x, weight, out, num_out, inner,
            N=config.outs, K=config.inner, LINES=_power_of_two(config.lines), num_warps=config.warps,
            **early_options(),
        )  # fmt: skip
        return out
    parts = out
    if config.parts > 1:
        parts = torch.empty(config.parts, num_rows, num_out, dtype=torch.float32, device=x.device)
    skinny_kernel[(-(-num_out // config.outs), config.parts)](
        x, weight, parts, num_rows, num_out, inner, x.stride(0), num_out,
        PARTS=config.parts, N=config.outs, K=config.inner, STAGES=config.stages, ROWS=MAX_ROWS,
        LINES=_power_of_two(config.lines), num_warps=config.warps, **early_options(),
    )  # fmt: skip
    if config.parts > 1:
        add_parts_kernel[(-(-num_out // 1024), num_rows)](
            parts, out, num_rows, num_out, PARTS=config.parts, N=1024, num_warps=4, **early_options()
        )
    return out


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)
