"""Products of few rows against torch's."""

import pytest
import torch

from executor_svc.kernels.skinny import (
    CANDIDATES,
    VECTOR_CANDIDATES,
    SkinnyConfig,
    candidates_for,
    config_for,
    skinny_linear,
)
from tests.interpreter import DEVICE


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "num_out", "inner"), [(1, 64, 512), (3, 48, 600), (16, 100, 1040)])
@pytest.mark.parametrize("config", [CANDIDATES[0], CANDIDATES[3], SkinnyConfig(32, 64, 5, 2, 4)])
def test_it_is_linear(config: SkinnyConfig, rows: int, num_out: int, inner: int, dtype: torch.dtype) -> None:
    """Sizes that no tile divides; parts that have nothing to do."""
    x, weight = draw(rows, inner + 16, dtype=dtype)[:, :inner], draw(num_out, inner, dtype=dtype) / inner**0.5
    got = skinny_linear(x, weight, config)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), x.float() @ weight.float().t(), atol=tolerance, rtol=tolerance)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = draw(16, 512, dtype=torch.float32), draw(32, 512, dtype=torch.float32)
    for config in (CANDIDATES[0], CANDIDATES[3]):
        together = skinny_linear(x, weight, config)
        assert torch.equal(skinny_linear(x[3:4], weight, config)[0], together[3])


def test_large_weights_take_large_tiles_and_small_ones_many_programs() -> None:
    assert config_for(128256, 2048).outs == 64
    assert config_for(16384, 2048).outs == 32
    assert config_for(2048, 8192).parts == 2
    assert config_for(3072, 2048).outs == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "inner"), [(64, 512), (45, 2100)])
def test_one_row_without_matrix_units(num_out: int, inner: int, dtype: torch.dtype) -> None:
    x, weight = draw(1, inner, dtype=dtype), draw(num_out, inner, dtype=dtype) / inner**0.5
    for config in VECTOR_CANDIDATES:
        got = skinny_linear(x, weight, config)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), x.float() @ weight.float().t(), atol=tolerance, rtol=tolerance)
    assert set(VECTOR_CANDIDATES) < set(candidates_for(1)) and candidates_for(2) == CANDIDATES
