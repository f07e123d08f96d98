"""What attention in exact numerics multiplies in batches: `ExactOps.settle` looks at products of weights alone."""

import pytest
import torch

from executor_svc.attention.exact import TILE
from executor_svc.numerics import ExactOps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 4, 16, 100])
def test_a_product_does_not_depend_on_the_others_of_its_batch(rows: int, dim: int) -> None:
    """Queries with keys, weights with values: of one sequence and tile, and of many of both."""
    device = torch.device("cuda")
    ops = ExactOps()
    ops.settle({(2048, 2048), (8192, 2048)}, device)
    generator = torch.Generator().manual_seed(rows)
    for inner, width in ((dim, TILE), (TILE, dim)):
        a = torch.randn(1024, rows, inner, generator=generator).to(device)
        b = torch.randn(1024, inner, width, generator=generator).to(device)
        alone = ops.matmul(a[:1], b[:1])[0]
        for count in (2, 8, 33, 128, 1024):
            assert torch.equal(ops.matmul(a[:count], b[:count])[0], alone), (ops.products, inner, count)
        few = ops.matmul(a[:, : max(1, rows // 2)], b)[0]
        assert torch.equal(few, alone[: max(1, rows // 2)]), (ops.products, inner, "fewer rows")
