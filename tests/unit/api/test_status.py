"""Every error of the tree has one status, with details that fit."""

from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2

from common.errors import InvalidInput, Overloaded, StepwireError, Unavailable
from scheduler_svc.api.status import DOMAIN, only_stepwire_errors, status_code, to_status


def tree(cls: type[StepwireError]) -> Iterator[type[StepwireError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from tree(sub)


# The command line's own errors, loaded by other tests, never reach a caller of the API.
CLASSES = [cls for cls in dict.fromkeys(tree(StepwireError)) if not cls.__module__.startswith("deploy")]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_status_and_error_info(cls: type[StepwireError]) -> None:
    error = cls("it went wrong", field="some.field", limit="7")
    status = to_status(error)
    assert grpc.StatusCode[cls.status].value[0] == status.code != grpc.StatusCode.OK.value[0]
    assert status.message == "it went wrong"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == DOMAIN and info.reason == cls.reason
    assert dict(info.metadata) == {"field": "some.field", "limit": "7"}
    names = {detail.TypeName().rsplit(".", 1)[-1] for detail in status.details}
    assert ("BadRequest" in names) == issubclass(cls, InvalidInput)
    assert ("RetryInfo" in names) == (cls.status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"))


def test_reasons_tell_classes_apart() -> None:
    reasons = [cls.reason for cls in CLASSES if cls is not StepwireError]
    assert len(set(reasons)) == len(reasons)
    assert all(reason == reason.upper() and reason.isidentifier() for reason in reasons)


def test_bad_request_names_the_field() -> None:
    status = to_status(InvalidInput("sampling.top_p is 2, it must be in (0, 1]", field="sampling.top_p"))
    bad = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "sampling.top_p"
    assert "(0, 1]" in bad.field_violations[0].description


@pytest.mark.parametrize(("error", "seconds", "nanos"), [
    (Overloaded("full", retry_after_ms=1500), 1, 500_000_000),
    (Unavailable("gone"), 1, 0),
])  # fmt: skip
def test_retry_info_says_when(error: StepwireError, seconds: int, nanos: int) -> None:
    retry = error_details_pb2.RetryInfo()
    assert to_status(error).details[-1].Unpack(retry)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (seconds, nanos)


def test_a_long_message_is_cut_to_fit_trailers() -> None:
    status = to_status(InvalidInput("x" * 100_000, field="text"))
    assert len(status.SerializeToString()) < 8192


def test_a_defect_of_ours_becomes_internal_without_its_words() -> None:
    with pytest.raises(StepwireError) as caught, only_stepwire_errors():
        raise KeyError("secret")
    assert status_code(caught.value) is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.message
