"""No attention backend, numerics or format of weights that the configuration offers is missing from the suite.

Not looked at: the type numbers are kept in (float32 here, bfloat16 in the CPU kernels), `exact` on a CUDA device, and
the late device under anything but `exact`.
"""

from typing import get_args

import pytest

from executor_svc.attention.registry import BACKENDS
from executor_svc.config import ExecutorConfig
from executor_svc.kernels_cpu.decoder import NativeDecoder
from executor_svc.kernels_cpu.packing import Format
from tests.contract.conftest import Makers
from tests.contract.kinds import RUNNERS

KINDS = RUNNERS.values()
ATTENTION = {
    "": "NativeAttention",
    "torch": "TorchPagedAttention",
    "exact": "ExactAttention",
    "varlen": "VarlenAttention",
    "triton": "TritonAttention",
}


def offered(field: str) -> set[str]:
    """Values of a setting; "auto" is one of the others."""
    setting = ExecutorConfig.model_fields[field]
    named = set(get_args(setting.annotation))
    if not named:  # any of the registry's: the names stand in the description alone
        named = set((setting.description or "").partition(";")[0].replace(" or ", ", ").split(", "))
    return named - {"auto"}


def test_every_attention_backend_is_here() -> None:
    assert {kind.backend for kind in KINDS if not kind.is_native} == set(BACKENDS) == offered("attention_backend")


def test_every_backend_is_here_in_all_numerics_it_takes() -> None:
    """Which they are, is tests/unit/executor/test_attention.py's to say."""
    assert {(kind.backend, kind.numerics) for kind in KINDS if not kind.is_native} == {
        ("torch", "fast"), ("varlen", "fast"), ("exact", "exact"), ("triton", "fast"), ("triton", "exact"),
    }  # fmt: skip
    assert {kind.numerics for kind in KINDS} == offered("numerics")


def test_every_format_of_weights_is_here() -> None:
    assert {kind.weights for kind in KINDS if kind.is_native} == offered("weight_dtype")


@pytest.mark.parametrize("make", RUNNERS, indirect=True)
def test_an_executor_is_what_its_kind_says(make: Makers) -> None:
    runner, kind = make.runner(), make.kind
    info, model = runner.info, runner.model
    assert (info.numerics, info.buckets, info.device) == (kind.numerics, kind.buckets, "cpu")
    assert info.dtype == ("bfloat16" if kind.is_native else "float32")
    assert type(runner._step._attention).__name__ == ATTENTION[kind.backend]
    assert isinstance(model, NativeDecoder) == kind.is_native
    if isinstance(model, NativeDecoder):
        matrices = [m for w in model.weights.layers for m in (w.qkv, w.output, w.gate_up, w.down)]
        assert {matrix.format for matrix in (*matrices, model.weights.head)} == {Format[kind.weights.upper()]}
