"""`stepwire top`: watches the steps of a scheduler and shows them, live on a terminal, as lines elsewhere, or once."""

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from deploy.top_steps import Board, Summary
from deploy.top_view import graph_columns, plain_lines, render
from stepwire_client import AsyncClient, NotImplementedByServer, PermissionDenied, StepwireError, Unauthenticated

# Steps come this much later and many in one message, so that watching costs the scheduler next to nothing.
INTERVAL_MS: Final = 100
STATS_S: Final = 1.0
STATS_DEADLINE_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 2.0
FOR_GOOD: Final = (Unauthenticated, PermissionDenied, NotImplementedByServer)


@dataclass(frozen=True, slots=True)
class TopOptions:
    """`once`: one picture (an object with `as_json`) after `seconds`, or after `num_steps` if those come before."""

    window_s: float = 10.0
    refresh_s: float = 0.5
    once: bool = False
    as_json: bool = False
    seconds: float = 2.0
    num_steps: int = 0


async def run_top(client: AsyncClient, options: TopOptions) -> None:
    """Until a signal asks to leave, or, with `once`, until there is something to show.

    Raises StepwireError when the first question is not answered, or never can be; later it waits for the server.
    """
    async with client:
        top = Top(client, options)
        if options.once:
            await top.once()
        elif sys.stdout.isatty():
            await top.live()
        else:
            await top.lines()


class Top:
    """Owner of the board and of the two tasks that fill it."""

    def __init__(self, client: AsyncClient, options: TopOptions) -> None:
        self._client = client
        self._options = options
        self._loop = asyncio.get_running_loop()
        window_s = max(options.window_s, options.seconds) if options.once else options.window_s
        self._board = Board(window_s, self._loop.time())
        self._enough = asyncio.Event()

    # ------------------------------------------------------------------------------------------------- what is shown

    async def once(self) -> None:
        options = self._options
        async with self._watching():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.seconds):
                    await self._enough.wait()
            self._board.take_stats(await self._client.stats(deadline=STATS_DEADLINE_S), self._loop.time())
        if options.as_json:
            self._print_json()
        else:
            console = Console(highlight=False)
            console.print(self._picture(console, height=10_000), soft_wrap=True)

    async def live(self) -> None:
        console = Console(highlight=False)
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            await self._repeat(
                self._options.refresh_s,
                lambda: screen.update(self._picture(console, console.height), refresh=True),
            )

    async def lines(self) -> None:
        show = self._print_json if self._options.as_json else self._print_lines
        await self._repeat(max(1.0, self._options.refresh_s), show)

    def _print_json(self) -> None:
        summary = self._board.summary(self._loop.time())
        print(json.dumps(summary_json(summary, self._client.address)), flush=True)

    def _print_lines(self) -> None:
        print("\n".join(plain_lines(self._board.summary(self._loop.time()))), flush=True)

    def _picture(self, console: Console, height: int) -> Any:
        width = console.width
        summary = self._board.summary(self._loop.time(), graph_columns(width))
        return render(summary, self._client.address, width, height, console.options.ascii_only)

    async def _repeat(self, every_s: float, show: Callable[[], None]) -> None:
        """Until SIGINT or SIGTERM, which so leave the terminal as it was."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, stop.set)
        try:
            async with self._watching() as watching:
                while not (stop.is_set() or watching.done()):
                    show()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(every_s):
                            await stop.wait()
                if watching.done():
                    watching.result()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(number)

    # -------------------------------------------------------------------------------------------------- what is seen

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator["asyncio.Task[None]"]:
        """The board fills inside; yields what is done only when it never can again."""
        self._board.take_stats(await self._client.stats(deadline=STATS_DEADLINE_S), self._loop.time())
        tasks = [asyncio.create_task(self._watch_steps()), asyncio.create_task(self._ask_stats())]
        try:
            yield tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_steps(self) -> None:
        """A scheduler that restarts ends the stream: it is opened anew until that succeeds."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._client.watch_steps(interval_ms=INTERVAL_MS) as steps:
                    async for step in steps:
                        self._board.add(step, self._loop.time())
                        pause_s = FIRST_PAUSE_S
                        if self._board.num_steps >= (self._options.num_steps or sys.maxsize):
                            self._enough.set()
            except FOR_GOOD:
                raise
            except StepwireError as error:
                self._board.problem = _waiting_for(error)
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    async def _ask_stats(self) -> None:
        """What no step tells: how requests ended, and how things stand while there are none."""
        while True:
            await asyncio.sleep(STATS_S)
            try:
                self._board.take_stats(await self._client.stats(deadline=STATS_DEADLINE_S), self._loop.time())
            except StepwireError as error:
                self._board.problem = _waiting_for(error)


def _waiting_for(error: StepwireError) -> str:
    return f"{error.message or error.status}; trying again"


def summary_json(summary: Summary, address: str) -> dict[str, Any]:
    """As scripts get it; tests and users rely on its names."""
    fields = {"address": address} | dataclasses.asdict(summary)
    for executor in fields["executors"]:
        del executor["decode_line"], executor["prefill_line"]
    return fields
