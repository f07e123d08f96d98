"""What every servicer method does around its work."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from common.errors import StepwireError
from scheduler_svc.api.status import abort, only_stepwire_errors

Context = grpc.aio.ServicerContext[Any, Any]
Result = TypeVar("Result")


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
