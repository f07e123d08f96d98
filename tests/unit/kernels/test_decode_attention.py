"""The decode kernel against attention written plainly in float32: shapes, edges, padding, splits."""

import pytest
import torch

from executor_svc.kernels.decode_attention import (
    DecodeSplit,
    DecodeWorkspace,
    decode_attention,
    even_split,
    fixed_split,
)
from tests.interpreter import DEVICE
from tests.unit.kernels.paged import PagedScene, tolerance

SENTINEL = 7.0


def run(
    scene: PagedScene, rows: list[int], split: DecodeSplit, *, window: int = 0, index: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns queries and outputs, by token; what no row names holds SENTINEL."""
    count = max(index) + 2 if index else len(rows)
    q = scene.queries(count)
    out = torch.full((count, scene.heads, scene.dim), SENTINEL, dtype=scene.dtype, device=DEVICE)
    workspace = DecodeWorkspace.make(len(rows), scene.heads, scene.dim, split, DEVICE)
    workspace.parts.fill_(torch.nan)
    before = [t.clone() for t in (scene.keys, scene.values, scene.tables)]
    decode_attention(
        q, scene.keys, scene.values, scene.tables, scene.lengths, torch.tensor(rows, device=DEVICE), out,
        scale=scene.scale, window=window, split=split, workspace=workspace,
        index=None if index is None else torch.tensor(index, device=DEVICE),
    )  # fmt: skip
    for old, new in zip(before, (scene.keys, scene.values, scene.tables), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())
    return q, out.cpu()


CASES = {
    # name: (lengths, heads, kv_heads, dim, block_size, window, split, dtype)
    "one tile": ([1, 63, 64, 65], 4, 2, 64, 16, 0, DecodeSplit(1), torch.float32),
    "no group": ([5, 130], 2, 2, 128, 8, 0, DecodeSplit(1), torch.float32),
    "odd group, even split": ([31, 32, 33, 257], 6, 2, 64, 32, 0, DecodeSplit(3), torch.float32),
    "more parts than keys": ([1, 2, 129], 4, 1, 128, 16, 0, DecodeSplit(4), torch.float32),
    "window": ([10, 70, 71, 200], 4, 1, 64, 16, 70, DecodeSplit(2), torch.float32),
    "window of one": ([1, 65], 2, 1, 64, 8, 1, DecodeSplit(2), torch.float32),
    "fixed": ([1, 127, 128, 129, 300], 4, 1, 64, 16, 0, fixed_split(320, 128), torch.float32),
    "fixed, window": ([60, 300], 4, 1, 64, 8, 90, fixed_split(320, 64), torch.float32),
    "group over one tile": ([50], 20, 1, 64, 16, 0, DecodeSplit(2), torch.float32),
    "small head": ([9, 40], 4, 2, 8, 4, 0, DecodeSplit(2), torch.float32),
    "odd head": ([9, 70], 2, 1, 80, 16, 0, DecodeSplit(2), torch.float32),
    "half": ([64, 150], 4, 1, 128, 16, 0, DecodeSplit(2), torch.float16),
    "bfloat16": ([64, 150], 8, 1, 128, 16, 0, DecodeSplit(2), torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_attention(name: str) -> None:
    lengths, heads, kv_heads, dim, block_size, window, split, dtype = CASES[name]
    scene = PagedScene(lengths, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype)
    rows = list(reversed(range(len(lengths))))
    q, out = run(scene, rows, split, window=window)
    for at, row in enumerate(rows):
        want = scene.plain(q[at], row, lengths[row] - 1, window)
        torch.testing.assert_close(out[at].float(), want, atol=tolerance(dtype), rtol=tolerance(dtype))


@pytest.mark.parametrize("parts", [1, 2])
def test_padding_reads_nothing_and_gives_zero(parts: int) -> None:
    scene = PagedScene([70, 3], heads=4, kv_heads=2, dim=64, block_size=16)
    q, out = run(scene, [-1, 1, -1, 0, -1], DecodeSplit(parts))
    assert not out[[0, 2, 4]].any()
    torch.testing.assert_close(out[1], scene.plain(q[1], 1, 2, 0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[3], scene.plain(q[3], 0, 69, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parts", [1, 3])
def test_places_among_other_tokens(parts: int) -> None:
    """Tokens that no row names keep what they hold."""
    scene = PagedScene([20, 140], heads=2, kv_heads=1, dim=64, block_size=8)
    q, out = run(scene, [1, 0], DecodeSplit(parts), index=[1, 4])
    torch.testing.assert_close(out[1], scene.plain(q[1], 1, 139, 0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[4], scene.plain(q[4], 0, 19, 0), atol=1e-5, rtol=1e-5)
    assert (out[[0, 2, 3, 5]] == SENTINEL).all()


def test_fixed_bits_hang_on_the_row_alone() -> None:
    """Neither on the batch nor on the longest context the launch was made for."""
    scene = PagedScene([200, 5, 129], heads=4, kv_heads=1, dim=64, block_size=16)
    q = scene.queries(3)

    def bits(rows: list[int], longest: int) -> dict[int, torch.Tensor]:
        split = fixed_split(longest, 64)
        out = torch.empty(len(rows), 4, 64, device=DEVICE)
        decode_attention(
            q[rows].contiguous(), scene.keys, scene.values, scene.tables, scene.lengths,
            torch.tensor(rows, device=DEVICE), out, scale=scene.scale, window=0, split=split,
            workspace=DecodeWorkspace.make(len(rows), 4, 64, split, DEVICE),
        )  # fmt: skip
        return dict(zip(rows, out.cpu(), strict=True))

    want = bits([0, 1, 2], 200)
    for rows, longest in (([0], 200), ([2, 1], 512), ([1, 0], 256)):
        for row, own in bits(rows, longest).items():
            assert torch.equal(own, want[row])


def test_nan_of_a_row_is_that_rows() -> None:
    scene = PagedScene([70, 70], heads=2, kv_heads=1, dim=64, block_size=16)
    q = scene.queries(2)
    q[0] = torch.nan
    for split in (DecodeSplit(1), DecodeSplit(2), fixed_split(128, 64)):
        out = torch.empty(2, 2, 64, device=DEVICE)
        decode_attention(
            q, scene.keys, scene.values, scene.tables, scene.lengths, torch.tensor([0, 1], device=DEVICE), out,
            scale=scene.scale, window=0, split=split, workspace=DecodeWorkspace.make(2, 2, 64, split, DEVICE),
        )  # fmt: skip
        assert out[0].isnan().all() and out[1].isfinite().all()


def test_few_long_sequences_are_split_and_many_are_not() -> None:
    assert even_split(1, 8, 131072).parts == 32
    assert even_split(1, 8, 256).parts == 2
    assert even_split(256, 8, 131072).parts == 1
    assert even_split(16, 8, 4096).parts == 4
    assert fixed_split(1000, 256) == DecodeSplit(4, 256)
