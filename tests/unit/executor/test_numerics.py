"""Products that do not depend on their batch, how they are chosen, and what the environment must say before."""

import os
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from executor_svc.build import default_dtype, make_device, make_ops
from executor_svc.environment import MKL_VARIABLE, prepare_environment, read_cpu_flags
from executor_svc.numerics import ExactOps, FastOps, Products, can_pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("products", list(Products))
def test_every_way_multiplies(products: Products) -> None:
    ops = ExactOps(products)
    x, weight, bias = torch.randn(19, 24), torch.randn(10, 24), torch.randn(10)
    assert torch.allclose(ops.linear(x, weight, bias), x @ weight.t() + bias, atol=1e-5)
    a, b = torch.randn(3, 5, 8), torch.randn(3, 8, 7)
    assert torch.allclose(ops.matmul(a, b), a @ b, atol=1e-5)
    assert torch.allclose(ops.matmul(a[:, :1], b), a[:, :1] @ b, atol=1e-5)


def test_the_slowest_way_is_always_invariant() -> None:
    ops = ExactOps(Products.ROWS)
    x, weight = torch.randn(40, 96), torch.randn(33, 96)
    together = ops.linear(x, weight)
    for row in range(40):
        assert torch.equal(together[row], ops.linear(x[row : row + 1], weight)[0])


def test_what_was_settled_on_is_invariant_for_batches_of_products_too() -> None:
    ops = ExactOps()
    ops.settle({(96, 64), (64, 200)}, CPU)
    a, b = torch.randn(12, 37, 64), torch.randn(12, 64, 64)
    whole = ops.matmul(a, b)
    for first, count in ((0, 1), (3, 2), (5, 7)):
        for begin, rows in ((0, 1), (4, 3), (20, 17)):
            part = ops.matmul(a[first : first + count, begin : begin + rows], b[first : first + count])
            assert torch.equal(part, whole[first : first + count, begin : begin + rows])


def test_products_that_depend_on_the_batch_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ExactOps()

    def is_invariant(shape: tuple[int, int], device: torch.device) -> bool:
        return ops.products is Products.ROWS or (ops.products is Products.TILES and shape == (8, 8))

    monkeypatch.setattr(ops, "_is_invariant", is_invariant)
    assert ops.settle({(8, 8)}, CPU) is Products.TILES
    assert ops.settle({(8, 8), (16, 8)}, CPU) is Products.ROWS
    monkeypatch.setattr(ops, "_is_invariant", lambda shape, device: False)
    with pytest.raises(ConfigError):
        ops.settle({(8, 8)}, CPU)


def test_the_check_finds_a_product_that_looks_at_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ExactOps()
    plain = ops.matmul
    monkeypatch.setattr(ops, "matmul", lambda a, b: plain(a, b) * (1 + 1e-7 * (a.shape[0] == 17)))
    assert not ops._is_invariant((24, 16), CPU)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_rms_norm(numerics: str) -> None:
    ops = make_ops(numerics)
    x, weight = torch.randn(7, 48), torch.rand(48)
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5)


@pytest.mark.skipif(not can_pack(), reason="this processor has no packed bfloat16 products")
def test_packed_products_are_the_same_products() -> None:
    ops, plain = FastOps(), FastOps()
    weight = torch.randn(96, 64).bfloat16()
    bias = torch.randn(96).bfloat16()
    assert ops.pack([weight, weight]) == weight.numel() * 2
    for rows in (1, 5, 33):
        x = torch.randn(rows, 64).bfloat16()
        for given in (None, bias):
            assert torch.allclose(ops.linear(x, weight, given), plain.linear(x, weight, given), rtol=2e-2, atol=2e-2)


def test_float32_weights_are_not_packed() -> None:
    assert FastOps().pack([torch.randn(8, 8)]) == 0


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ConfigError):
        make_ops("precise")
    for name in ("tpu", "cuda:x", "cuda:99"):
        with pytest.raises(ConfigError) as error:
            make_device(name)
        assert error.value.field == "device"
    assert f"there is no cuda:99 device: torch {torch.__version__}, built for" in error.value.message


def test_default_precision() -> None:
    assert default_dtype("exact", "cpu") is default_dtype("exact", "cuda") is torch.float32
    assert default_dtype("fast", "cpu") is (torch.bfloat16 if can_pack() else torch.float32)
    assert default_dtype("fast", "cuda") is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"avx512f", "avx2"}, "AVX512,STRICT"), ({"avx2"}, "AVX2,STRICT"), (set(), "COMPATIBLE")],
)
def test_the_environment_of_exact_numerics(monkeypatch: pytest.MonkeyPatch, flags: set[str], expected: str) -> None:
    monkeypatch.delenv(MKL_VARIABLE, raising=False)
    prepare_environment("fast", cpu_flags=frozenset(flags))
    assert MKL_VARIABLE not in os.environ
    prepare_environment("exact", cpu_flags=frozenset(flags))
    assert os.environ[MKL_VARIABLE] == expected
    prepare_environment("exact", cpu_flags=frozenset())
    assert os.environ[MKL_VARIABLE] == expected, "what stands there stays"


def test_cpu_flags_are_read_where_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor: 0\nflags\t\t: fpu avx2 avx512f\n")
    assert read_cpu_flags(path) == {"fpu", "avx2", "avx512f"}
    assert read_cpu_flags(tmp_path / "none") == frozenset()


def test_exact_products_of_float32_are_whole_whatever_the_environment_says() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        make_ops("exact")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")
