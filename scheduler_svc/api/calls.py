"""What every servicer method does around its work."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc.aio

from common.errors import StepwireError
from scheduler_svc.api.status import abort, only_stepwire_errors

Context = grpc.aio.ServicerContext[Any, Any]
Result = TypeVar("Result")


# Of it gRPC makes no name public.
GRPC_LOG: Final = "grpc._cython.cygrpc"
_log = logging.getLogger(__name__)


def no_lost_answer(record: logging.LogRecord) -> bool:
    """A filter of GRPC_LOG. An answer that can not be sent because its call has just ended, by its deadline most often,
    is an error with a traceback there: gRPC's loop has yet to hear of that end. No defect: one line for who debugs.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ != "ExecuteBatchError":
        return True
    _log.debug("an answer had no call any more: %s", record.getMessage())
    return False


async def answered(context: Context, work: Awaitable[Result]) -> Result:
    """The answer of a unary call; a StepwireError becomes its status."""
    try:
        with only_stepwire_errors():
            return await work
    except StepwireError as error:
        await abort(context, error)


def on_done(context: Context, callback: Callable[[], None]) -> None:
    """`callback` runs when the call is over, however it ended.

    A streaming method needs it beside its `finally`: when the caller goes away while a message is being written, the
    method is suspended at its `yield`, and its `finally` runs only when the garbage collector finds it.
    """
    context.add_done_callback(lambda _: callback())  # type: ignore[arg-type]
