"""torch's own varlen_attn on CUDA means what the tests' stand-in for it means."""

from typing import Any

import pytest
import torch

from executor_svc.attention.varlen import why_no_varlen
from tests.varlen_reference import varlen_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(why_no_varlen()), reason=why_no_varlen() or "there is one"),
]


@pytest.mark.parametrize("window", [(-1, 0), (99, 0)])
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [1, 70, 1, 300], [600]])
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 4, 128)])
def test_the_stand_in_means_the_same(window: tuple[int, int], queries: list[int], heads: tuple[int, int, int]) -> None:
    """Rows that decode, chunks behind a cached prefix, both at once; bfloat16, pages of 256."""
    from torch.nn.attention.varlen import varlen_attn

    num_heads, kv_heads, dim = heads
    torch.manual_seed(1)
    used = [count + before for count, before in zip(queries, (255, 600, 1, 40), strict=False)]
    pages = [-(-length // 256) for length in used]
    tables = torch.zeros(len(queries), max(pages), dtype=torch.int32)
    order = iter(torch.randperm(sum(pages)).tolist())
    for row, count in enumerate(pages):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)])
    q = torch.randn(sum(queries), num_heads, dim).to("cuda", torch.bfloat16)
    keys, values = (torch.randn(sum(pages), 256, kv_heads, dim).to("cuda", torch.bfloat16) for _ in range(2))
    ends, key_ends = (torch.tensor([0, *counts]).cumsum(0).to("cuda", torch.int32) for counts in (queries, used))
    more: dict[str, Any] = {
        "scale": dim**-0.5, "window_size": window, "enable_gqa": True, "num_splits": 1,
        "seqused_k": torch.tensor(used, dtype=torch.int32, device="cuda"), "block_table": tables.cuda(),
    }  # fmt: skip
    told = (q, keys, values, ends, key_ends, max(queries), max(used))
    torch.testing.assert_close(varlen_attn(*told, **more), varlen_reference(*told, **more), atol=2e-2, rtol=2e-2)
