"""The one error tree of both services.

Every class names its gRPC status (`grpc.StatusCode` name) and a stable machine-readable reason;
`scheduler_svc.api.status` turns an instance into a status with google.rpc details. Asserts are for our own bugs only;
everything a caller, an operator or a peer can cause is one of these.
"""

from typing import ClassVar


class StepwireError(Exception):
    """Base of all errors Stepwire raises on purpose.

    `field` names the offending input ("sampling.top_p"), `limit` the limit that was passed; both may be empty.
    """

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", limit: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.limit = limit
        self.retry_after_ms = retry_after_ms


class InvalidInput(StepwireError):
    """A value the caller sent can not be served, now or ever."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_INPUT"


class TooLarge(InvalidInput):
    """The request can never fit: prompt, context or KV cache limits."""

    reason = "TOO_LARGE"


class UnknownModel(StepwireError):
    status = "NOT_FOUND"
    reason = "UNKNOWN_MODEL"


class Unauthenticated(StepwireError):
    """The call carries no accepted bearer token."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class DuplicateRequest(StepwireError):
    """A request with this id is live."""

    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST"


class NotSupported(StepwireError):
    """The feature exists in the protocol but not in this server."""

    status = "UNIMPLEMENTED"
    reason = "NOT_SUPPORTED"


class Overloaded(StepwireError):
    """The queue is full; the caller may retry after `retry_after_ms`."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class SlowReader(StepwireError):
    """The caller did not read its stream for `slow_reader_s`."""

    status = "RESOURCE_EXHAUSTED"
    reason = "SLOW_READER"


class Unavailable(StepwireError):
    """Nothing is wrong with the request; the service can not take it now."""

    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class Draining(Unavailable):
    reason = "DRAINING"


class RequestAborted(StepwireError):
    """Someone called Abort, or the caller went away."""

    status = "CANCELLED"
    reason = "ABORTED"


class DeadlinePassed(StepwireError):
    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class SequenceFailed(StepwireError):
    """The executor could not compute this sequence (for example not-a-number logits)."""

    status = "INTERNAL"
    reason = "SEQUENCE_FAILED"


class ConfigError(StepwireError):
    """Configuration is wrong: unknown key, value out of range, file that can not be read."""

    status = "FAILED_PRECONDITION"
    reason = "CONFIG"


class ModelError(StepwireError):
    """The model's files can not be used: missing, truncated, mistyped, unsupported architecture."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL"


class ModelTooLarge(ModelError):
    """The model's weights need more memory than there is."""

    reason = "MODEL_TOO_LARGE"


class ProtocolError(StepwireError):
    """A peer broke the step protocol, or speaks another version of it."""

    status = "FAILED_PRECONDITION"
    reason = "PROTOCOL"


class ExecutorHeld(ProtocolError):
    """Another scheduler holds the executor's lease."""

    reason = "EXECUTOR_HELD"


class ExecutorLost(Unavailable):
    """The stream to the executor broke."""

    reason = "EXECUTOR_LOST"
