"""No choice that the configuration offers is missing from the suite."""

from typing import get_args

import pytest

from executor_svc.attention.registry import BACKENDS
from executor_svc.config import ExecutorConfig
from tests.contract.conftest import Makers
from tests.contract.kinds import RUNNERS

KINDS = RUNNERS.values()


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
    info, kind = make().info, make.kind
    assert (info.numerics, info.buckets, info.device) == (kind.numerics, kind.buckets, "cpu")
    assert info.dtype == ("bfloat16" if kind.is_native else "float32")
