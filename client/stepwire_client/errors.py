"""One exception class for each gRPC status a Stepwire server answers with."""

import re
from collections.abc import Iterable
from typing import Any, Final

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
# gRPC's own refusal, at either end; the server's code never saw the call.
_OVERSIZE: Final = re.compile(r"(?:(CLIENT|SERVER): )?(?:Sent|Received) message larger than max \((\d+) vs\. (\d+)\)")


class StepwireError(Exception):
    """A call failed.

    `status`: the gRPC status's name. `reason`: stable and machine-readable ("TOO_LARGE"); empty when the failure is not
    the server's own (no connection, say). `field`: the offending input ("sampling.top_p"). `limit`: the limit passed.
    `retry_after`: seconds after which the server suggests to try again. Empty and None: not told.
    """

    status: str = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        limit: str = "",
        retry_after: float | None = None,
        status: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.field = field
        self.limit = limit
        self.retry_after = retry_after
        if status:
            self.status = status


class InvalidArgument(StepwireError):
    status = "INVALID_ARGUMENT"


class NotFound(StepwireError):
    status = "NOT_FOUND"


class AlreadyExists(StepwireError):
    status = "ALREADY_EXISTS"


class ResourceExhausted(StepwireError):
    status = "RESOURCE_EXHAUSTED"


class FailedPrecondition(StepwireError):
    status = "FAILED_PRECONDITION"


class Unavailable(StepwireError):
    status = "UNAVAILABLE"


class Cancelled(StepwireError):
    status = "CANCELLED"


class DeadlineExceeded(StepwireError):
    status = "DEADLINE_EXCEEDED"


class NotImplementedByServer(StepwireError):
    status = "UNIMPLEMENTED"


class Unauthenticated(StepwireError):
    status = "UNAUTHENTICATED"


class PermissionDenied(StepwireError):
    status = "PERMISSION_DENIED"


class Internal(StepwireError):
    status = "INTERNAL"


class BrokenStream(Internal):
    """The server ended a stream without saying how the request finished. `reason` is BROKEN_STREAM."""


BY_STATUS: dict[str, type[StepwireError]] = {
    kind.status: kind
    for kind in (
        InvalidArgument, NotFound, AlreadyExists, ResourceExhausted, FailedPrecondition, Unavailable, Cancelled,
        DeadlineExceeded, NotImplementedByServer, Unauthenticated, PermissionDenied, Internal,
    )
}  # fmt: skip


def from_rpc_error(error: grpc.RpcError) -> StepwireError:
    """The typed exception for a failed call, with what google.rpc details it carries."""
    call: Any = error  # grpc types neither RpcError's methods nor those of its asynchronous cousin
    code = call.code() if hasattr(call, "code") else None
    status = code.name if code is not None else "UNKNOWN"
    text = (call.details() if hasattr(call, "details") else "") or status
    metadata = (call.trailing_metadata() if hasattr(call, "trailing_metadata") else None) or ()
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after: float | None = None
    for detail in _details(metadata):
        detail.Unpack(info)  # each Unpack does nothing when the detail is of another kind
        detail.Unpack(bad)
        if detail.Unpack(retry):
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if not info.reason and (oversize := _OVERSIZE.search(text)):
        side, size, limit = oversize.groups()
        whose = {"CLIENT": "this client's ", "SERVER": "the server's "}.get(side, "")
        text = f"a message of {size} bytes is larger than {whose}max_message_bytes, {limit}"
        info.reason, info.metadata["limit"] = "MESSAGE_TOO_LARGE", limit
    field = bad.field_violations[0].field if bad.field_violations else info.metadata.get("field", "")
    kind = BY_STATUS.get(status, StepwireError)
    return kind(
        text,
        reason=info.reason,
        field=field,
        limit=info.metadata.get("limit", ""),
        retry_after=retry_after,
        status=status,
    )


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> list[AnyMessage]:
    """The details of google.rpc.Status among trailing metadata; none when there are none or they can't be read."""
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
