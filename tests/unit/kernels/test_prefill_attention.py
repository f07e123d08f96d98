"""The prefill kernel against attention written plainly in float32: chunks, cached prefixes, windows, neighbours."""

import pytest
import torch

from executor_svc.kernels.decode_attention import DecodeWorkspace, decode_attention, fixed_split
from executor_svc.kernels.prefill_attention import prefill_attention
from tests.interpreter import DEVICE
from tests.unit.kernels.paged import PagedScene, tolerance

SENTINEL = 7.0
# (row, first position, count), as chunks follow each other in a step; a row of None: tokens that are not prefill's.
Work = list[tuple[int | None, int, int]]


def run(scene: PagedScene, work: Work, *, window: int = 0, split: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum(count for _, _, count in work)
    q = scene.queries(total)
    out = torch.full((total, scene.heads, scene.dim), SENTINEL, dtype=scene.dtype, device=DEVICE)
    rows, columns, first = [], [], 0
    for row, start, count in work:
        rows.append(-1 if row is None else row)
        if row is not None:
            columns.append([len(rows) - 1, first, count, start])
        first += count
    prefill_attention(
        q, scene.keys, scene.values, scene.tables, torch.tensor(rows, device=DEVICE),
        torch.tensor(columns, device=DEVICE).t().contiguous(), out,
        scale=scene.scale, window=window, split_tokens=split,
    )  # fmt: skip
    return q, out.cpu()


def check(scene: PagedScene, work: Work, q: torch.Tensor, out: torch.Tensor, window: int) -> None:
    first = 0
    for row, start, count in work:
        if row is None:
            assert (out[first : first + count] == SENTINEL).all()
        elif row >= 0:
            for at in range(count):
                want = scene.plain(q[first + at], row, start + at, window)
                got = out[first + at].float()
                torch.testing.assert_close(got, want, atol=tolerance(scene.dtype), rtol=tolerance(scene.dtype))
        first += count


CASES: dict[str, tuple[list[int], int, int, int, int, int, Work, torch.dtype]] = {
    # name: (lengths, heads, kv_heads, dim, block_size, window, work, dtype)
    "whole prompts": ([1, 33, 70], 4, 2, 64, 16, 0, [(0, 0, 1), (1, 0, 33), (2, 0, 70)], torch.float32),
    "cached prefix": ([200], 4, 1, 64, 8, 0, [(0, 130, 70)], torch.float32),
    "behind a tile's edge": ([192], 2, 2, 128, 32, 0, [(0, 127, 65)], torch.float32),
    "mixed": (
        [50, 90],
        2,
        1,
        64,
        16,
        0,
        [(None, 0, 2), (1, 40, 9), (None, 0, 1), (0, 49, 1)],
        torch.float32,
    ),
    "window": ([180], 4, 1, 64, 16, 70, [(0, 90, 90)], torch.float32),
    "small window": ([40, 20], 2, 1, 64, 8, 3, [(0, 0, 40), (1, 5, 15)], torch.float32),
    "odd group": ([75], 3, 1, 64, 16, 0, [(0, 3, 72)], torch.float32),
    "large group": ([20], 20, 1, 64, 16, 0, [(0, 0, 20)], torch.float32),
    "many short chunks": ([9] * 9, 2, 1, 16, 4, 0, [(row, row % 4, 5) for row in range(9)], torch.float32),
    "odd head": ([70], 2, 1, 80, 16, 0, [(0, 0, 70)], torch.float32),
    "half": ([100], 4, 1, 64, 16, 0, [(0, 30, 70)], torch.float16),
    "bfloat16": ([100], 4, 1, 128, 16, 0, [(0, 30, 70)], torch.bfloat16),
}


@pytest.mark.parametrize(
    ("name", "split"),
    [*((name, 0) for name in CASES), ("cached prefix", 64), ("window", 64), ("mixed", 64)],
)
def test_it_is_attention(name: str, split: int) -> None:
    lengths, heads, kv_heads, dim, block_size, window, work, dtype = CASES[name]
    scene = PagedScene(lengths, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype)
    q, out = run(scene, work, window=window, split=split)
    check(scene, work, q, out, window)


def test_padding_reads_nothing_and_gives_zero() -> None:
    scene = PagedScene([40], heads=4, kv_heads=2, dim=64, block_size=16)
    q, out = run(scene, [(-1, 0, 5), (0, 10, 30), (-1, 0, 1)])
    assert not out[:5].any() and not out[35:].any()
    check(scene, [(-1, 0, 5), (0, 10, 30), (-1, 0, 1)], q, out, 0)


def test_fixed_bits_depend_neither_on_chunks_nor_on_decoding() -> None:
    length, window = 150, 70
    scene = PagedScene([length], heads=4, kv_heads=1, dim=64, block_size=16)
    q = scene.queries(length)

    def chunked(size: int) -> torch.Tensor:
        out = torch.empty(length, 4, 64, device=DEVICE)
        for start in range(0, length, size):
            count = min(size, length - start)
            prefill_attention(
                q[start : start + count], scene.keys, scene.values, scene.tables, torch.tensor([0], device=DEVICE),
                torch.tensor([[0], [0], [count], [start]], device=DEVICE), out[start : start + count],
                scale=scene.scale, window=window, split_tokens=64,
            )  # fmt: skip
        return out.cpu()

    want = chunked(length)
    assert torch.equal(chunked(80), want)
    split = fixed_split(192, 64)
    for position in (63, 64, 149):
        out = torch.empty(1, 4, 64, device=DEVICE)
        decode_attention(
            q[position : position + 1], scene.keys, scene.values, scene.tables,
            torch.tensor([position + 1], device=DEVICE), torch.tensor([0], device=DEVICE), out,
            scale=scene.scale, window=window, split=split,
            workspace=DecodeWorkspace.make(1, 4, 64, split, DEVICE),
        )  # fmt: skip
        assert torch.equal(out.cpu()[0], want[position]), position
