"""What the other tests of kernels rely on where no GPU runs them."""

import numpy as np
import pytest

from tests.interpreter import in_order


@pytest.mark.parametrize("inner", [16, 64, 100, 512])
def test_a_number_of_a_product_hangs_on_its_row_and_column_alone(inner: int) -> None:
    draw = np.random.default_rng(1)
    a, b = draw.standard_normal((128, inner), np.float32), draw.standard_normal((inner, 64), np.float32)
    whole = in_order(a, b)
    np.testing.assert_allclose(whole, a.astype(np.float64) @ b, rtol=1e-3, atol=1e-4)
    for rows, columns in ((16, 16), (16, 64), (64, 16), (64, 64), (128, 32)):
        want = whole[:rows, :columns]
        own, other = a[:rows], b[:, :columns]
        assert np.array_equal(in_order(own, other), want)
        assert np.array_equal(in_order(np.asfortranarray(own), np.asfortranarray(other)), want), "where they lie"
        assert np.array_equal(in_order(own[None], other[None])[0], want)
