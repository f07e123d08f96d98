"""One error tree; every class of it has a status and a reason."""

import importlib
import pkgutil
import re
from collections.abc import Iterator

import grpc
import pytest

import common
import scheduler_svc
from common.errors import InvalidInput, StepwireError


def tree(kind: type[StepwireError] = StepwireError) -> Iterator[type[StepwireError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def ours() -> list[type[StepwireError]]:
    """All classes of the tree that the scheduler's process can raise."""
    for package in (common, scheduler_svc):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    return sorted({kind for kind in tree() if kind.__module__.split(".")[0] in ("common", "scheduler_svc")}, key=str)


def test_every_class_has_a_grpc_status_and_a_stable_reason() -> None:
    for kind in ours():
        assert kind.status in grpc.StatusCode.__members__ and kind.status != "OK", kind
        assert re.fullmatch(r"[A-Z][A-Z_]+", kind.reason), kind
        assert kind.__doc__ or "reason" in vars(kind), f"{kind} says neither what it means nor anything of its own"


def test_reasons_tell_classes_apart() -> None:
    named = [kind.reason for kind in ours() if "reason" in vars(kind) and kind is not StepwireError]
    assert len(named) == len(set(named))


def test_an_error_carries_what_is_at_fault() -> None:
    error = InvalidInput("too hot", field="sampling.temperature", limit="100")
    assert (error.message, error.field, error.limit, error.retry_after_ms) == (
        "too hot",
        "sampling.temperature",
        "100",
        0,
    )
    assert str(error) == "too hot"
    with pytest.raises(StepwireError):
        raise error
