"""The one status table: a StepwireError becomes a gRPC status with google.rpc details, here and nowhere else.

ErrorInfo (domain "stepwire", the class's reason) always; BadRequest when the input named by `field` is at fault;
RetryInfo when trying again later may help.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from opentelemetry import trace

from common.errors import InvalidInput, StepwireError

DOMAIN: Final = "stepwire"
DETAILS_KEY: Final = "grpc-status-details-bin"
DEFAULT_RETRY_MS: Final = 1000
MAX_MESSAGE_CHARS: Final = 1024

_RETRYABLE: Final = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)

_log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]


def status_code(error: StepwireError) -> grpc.StatusCode:
    return grpc.StatusCode[error.status]


def to_status(error: StepwireError) -> status_pb2.Status:
    """The complete status; its message is cut to what fits into HTTP/2 trailers."""
    code = status_code(error)
    message = error.message[:MAX_MESSAGE_CHARS]
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    if error.limit:
        info.metadata["limit"] = error.limit
    details: list[Message] = [info]
    if isinstance(error, InvalidInput) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if code in _RETRYABLE:
        milliseconds = error.retry_after_ms or DEFAULT_RETRY_MS
        delay = duration_pb2.Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]", error: StepwireError, trailing: Metadata = ()
) -> NoReturn:
    """Ends the call with the error's status, and says in its span, if any, what OpenTelemetry leaves out: why.

    `abort`, not `abort_with_status`: interceptors see only the former.
    """
    status = to_status(error)
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({"error.type": error.reason, "stepwire.error": status.message})
    metadata: Metadata = ((DETAILS_KEY, status.SerializeToString()), *trailing)
    await context.abort(status_code(error), status.message, metadata)


@contextmanager
def only_stepwire_errors() -> Iterator[None]:
    """Turns a defect of ours into an INTERNAL StepwireError, so that no call ends with a Python message as UNKNOWN."""
    try:
        yield
    except (StepwireError, grpc.aio.AbortError):
        raise
    except Exception as error:
        _log.exception("a call failed unexpectedly")
        raise StepwireError(f"internal error: {type(error).__name__}") from error
