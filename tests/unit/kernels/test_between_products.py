"""Norms, rotation with the write to the cache, and the gate, against the same in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from executor_svc.kernels.activation import silu_mul
from executor_svc.kernels.kv_write import write_kv
from executor_svc.kernels.norm import add_rms_norm, rms_norm
from executor_svc.kernels.rotary import rotate_and_write
from executor_svc.models.config import RopeConfig
from executor_svc.models.rope import RotaryTable, rotate
from tests.interpreter import DEVICE

EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-6 if got.dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 576, 2048])
def test_norm_and_residual(width: int, dtype: torch.dtype) -> None:
    wide = draw(3, width + 8, dtype=dtype)
    x, weight, residual = wide[:, :width], draw(width, dtype=dtype), draw(3, width, dtype=dtype)
    close(rms_norm(x, weight, EPS), F.rms_norm(x.float(), (width,), weight.float(), EPS))
    total = x + residual
    got = add_rms_norm(x, residual, weight, EPS)
    close(residual, total)  # the interpreter rounds bfloat16 towards zero
    close(got, F.rms_norm(total.float(), (width,), weight.float(), EPS))
    assert rms_norm(x[:0], weight, EPS).shape == (0, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 1024, 1536])
def test_gate(width: int, dtype: torch.dtype) -> None:
    gate_up = draw(2, 2 * width, dtype=dtype)
    gate, up = gate_up.float().chunk(2, -1)
    close(silu_mul(gate_up), F.silu(gate) * up)


SLOTS = 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (9, 3, 64), (2, 2, 80), (4, 1, 8)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotation_and_write(heads: int, kv_heads: int, dim: int, has_norms: bool, dtype: torch.dtype) -> None:
    """Padding, whose slots lie outside, writes nowhere; slots that no token has keep what they hold."""
    qkv = draw(5, heads + 2 * kv_heads, dim, dtype=dtype)
    positions = torch.tensor([0, 7, 3, 99, 0], device=DEVICE)
    slots = torch.tensor([3, 0, SLOTS, 11, -1], device=DEVICE)
    table = RotaryTable(RopeConfig(), dim, 100, dtype=dtype, device=DEVICE)
    norms = (draw(dim, dtype=dtype), draw(dim + 1, dtype=dtype)[1:]) if has_norms else None
    # The two blocks behind the cache's own, which padding's slots name, are poison to be left alone.
    keys = torch.full((SLOTS + 4, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE)
    values = keys.clone()
    q = rotate_and_write(qkv, positions, table.table, slots, keys, values, SLOTS, norms=norms, eps=EPS)

    plain_q, plain_k, plain_v = qkv.float().tensor_split((heads, heads + kv_heads), 1)
    if norms is not None:
        plain_q, plain_k = (
            F.rms_norm(t, (dim,), w.float(), EPS) for t, w in zip((plain_q, plain_k), norms, strict=True)
        )
    cos, sin = (t.float() for t in table.gather(positions))
    close(q, rotate(plain_q, cos, sin))
    written = [3, 0, 11]
    close(keys[written], rotate(plain_k, cos, sin)[[0, 1, 3]])
    assert torch.equal(values[written], plain_v[[0, 1, 3]].to(dtype))
    others = [slot for slot in range(SLOTS + 4) if slot not in written]
    assert (keys[others] == 7.0).all() and (values[others] == 7.0).all()


def test_plain_write() -> None:
    qkv = draw(4, 6, 64)
    k, v = qkv[:, 2:4], qkv[:, 4:]
    keys = torch.full((SLOTS, 2, 64), 7.0, device=DEVICE)
    values = keys.clone()
    write_kv(k, v, torch.tensor([5, -1, 10, 2], device=DEVICE), keys, values, 10)
    assert torch.equal(keys[[5, 2]], k[[0, 3]]) and torch.equal(values[[5, 2]], v[[0, 3]])
    others = [slot for slot in range(SLOTS) if slot not in (5, 2)]
    assert (keys[others] == 7.0).all() and (values[others] == 7.0).all()
