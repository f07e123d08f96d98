"""A watcher that breaks must not take the engine with it: it is told so in the log, once, and watches no more."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from scheduler_svc.observer import NoObserver, StepObserver

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class GuardedObserver:
    """A StepObserver around another; its methods never raise. Loop thread.

    The methods are made once, here: where nothing watches they are NoObserver's own and a step pays for no guard.
    """

    def __init__(self, inner: StepObserver) -> None:
        self._watch(inner)

    def _watch(self, inner: StepObserver) -> None:
        guard = _bare if type(inner) is NoObserver else self._guarded
        nothing = NoObserver()
        self.on_submit = guard(inner.on_submit, nothing.on_submit)
        self.trace_context = guard(inner.trace_context, nothing.trace_context)
        self.on_plan = guard(inner.on_plan, nothing.on_plan)
        self.on_result = guard(inner.on_result, nothing.on_result)
        self.on_delivered = guard(inner.on_delivered, nothing.on_delivered)
        self.on_tokens = guard(inner.on_tokens, nothing.on_tokens)
        self.on_end = guard(inner.on_end, nothing.on_end)
        self.on_executor = guard(inner.on_executor, nothing.on_executor)

    def _guarded(self, call: Callable[P, T], instead: Callable[P, T]) -> Callable[P, T]:
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except Exception:  # whatever it is: see the module
                log.exception("watching steps failed; steps and requests are not traced any more")
                self._watch(NoObserver())
                return instead(*args, **kwargs)

        return guarded


def _bare(call: Callable[P, T], instead: Callable[P, T]) -> Callable[P, T]:
    return call
