"""What `stepwire generate`, `chat` and `info` do with a client."""

import contextlib
import dataclasses
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from deploy.terminal import err, print_json, write_answer
from stepwire_client import Client, Completion, Delta, GenerateOptions, Generation, Message, StepwireError

READINESS = "stepwire.v1.Inference"
LIVENESS = "stepwire.liveness"


def completion_json(answer: Completion) -> dict[str, Any]:
    """A completion as scripts get it: raw logits, never asked for here, left out."""
    fields = dataclasses.asdict(answer)
    del fields["raw_logits"]
    return fields


def generate(client: Client, prompt: str, options: GenerateOptions, deadline: float | None, as_json: bool) -> None:
    if options.get("n", 1) != 1:
        generate_choices(client, prompt, options, deadline, as_json)
        return
    if as_json:
        print_json(completion_json(client.complete(prompt, deadline=deadline, **options)))
        return
    with client.generate(prompt, deadline=deadline, **options) as stream:
        stream_answer(stream)


def generate_choices(
    client: Client, prompt: str, options: GenerateOptions, deadline: float | None, as_json: bool
) -> None:
    """Several answers, in the order in which they end."""
    with client.generate(prompt, stream=False, deadline=deadline, **options) as stream:
        for answer in stream.choices():
            if as_json:
                print_json(completion_json(answer))
            else:
                write_answer(f"[{answer.index}] {answer.text}\n")


def reset_prefix_cache(client: Client, as_json: bool) -> None:
    reset = client.reset_prefix_cache(deadline=10)
    if as_json:
        print_json(dataclasses.asdict(reset))
    else:
        print(f"{reset.dropped_blocks} idle blocks dropped, {reset.forgotten_blocks} in use forgotten")


def stream_answer(stream: Generation) -> str:
    """Writes the answer as it comes, ends it with a newline, returns it. Ctrl-C leaves a whole line behind too."""
    pieces: list[str] = []
    try:
        with _closed_by_interrupt(stream):
            for event in stream:
                if isinstance(event, Delta) and event.text:
                    pieces.append(event.text)
                    write_answer(event.text)
    finally:
        if pieces and not pieces[-1].endswith("\n"):
            write_answer("\n")
    return "".join(pieces)


@contextlib.contextmanager
def _closed_by_interrupt(stream: Generation) -> Iterator[None]:
    """Ctrl-C closes `stream`; KeyboardInterrupt is raised when what is done within has ended. Raised inside gRPC it may
    leave a lock of the channel held, for which the next call would wait for ever. A second Ctrl-C raises it at once."""
    is_main = threading.current_thread() is threading.main_thread()  # others set no handlers
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def close(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        # The thread that was interrupted may hold the lock that this waits for.
        threading.Thread(target=stream.close, name="close-answer", daemon=True).start()

    signal.signal(signal.SIGINT, close)
    try:
        yield
    except StepwireError:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


def chat(
    client: Client, message: str | None, system: str, options: GenerateOptions, deadline: float | None, as_json: bool
) -> None:
    """One message, or a conversation read from standard input."""

    def answer(history: list[Message]) -> str:
        if as_json:
            whole = client.chat(history, deadline=deadline, **options)
            print_json(completion_json(whole))
            return whole.text
        with client.generate(messages=history, deadline=deadline, **options) as stream:
            return stream_answer(stream)

    start = [Message("system", system)] if system else []
    if message is not None:
        text = sys.stdin.read() if message == "-" else message
        answer([*start, Message("user", text)])
        return
    interactive = sys.stdin.isatty() and not as_json
    if interactive:
        with contextlib.suppress(ImportError):  # line editing and history, where Python was built with it
            importlib.import_module("readline")
        err(
            f"{client.model_info(deadline=10).model}: Ctrl-C ends an answer, Ctrl-D the conversation, /reset forgets it"
        )
    converse(start, answer, interactive)


def converse(start: list[Message], answer: Callable[[list[Message]], str], interactive: bool) -> None:
    """Turn after turn, the whole history sent each time. A turn that failed or was cut short is forgotten."""
    history = list(start)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                err("")
            return
        except KeyboardInterrupt:  # at the prompt: throw the line away, as shells do
            if not interactive:
                raise
            err("")
            continue
        if line == "/reset":
            history = list(start)
        elif line == "/exit":
            return
        elif line:
            turn = Message("user", line)
            try:
                history += [turn, Message("assistant", answer([*history, turn]))]
            except KeyboardInterrupt:
                if not interactive:
                    raise
            except StepwireError as error:
                if not interactive:
                    raise
                err(f"{error.message} ({error.status})")
            except ValueError as error:  # what was typed is no text: bytes of another encoding
                if not interactive:
                    raise
                err(str(error))


def info(client: Client, as_json: bool) -> None:
    """Model, health and counters. A server that is not ready still has a health and counters."""
    health = {"ready": client.health(READINESS, deadline=10), "alive": client.health(LIVENESS, deadline=10)}
    try:
        model = dataclasses.asdict(client.model_info(deadline=10))
    except StepwireError as error:
        if health["ready"] == "serving":
            raise
        model = {"error": error.message}
    stats = dataclasses.asdict(client.stats(deadline=10))
    if as_json:
        print_json({"address": client.address, "health": health, "model": model, "stats": stats})
        return
    from rich.console import Console
    from rich.table import Table

    executors = stats.pop("executors")
    table = Table(show_header=False, box=None, pad_edge=False)
    for title, values in ({"server": {"address": client.address, **health}} | {"model": model, "stats": stats}).items():
        table.add_row(f"[bold]{title}[/]", "")
        for name, value in values.items():
            table.add_row(f"  {name}", _plain(value))
    for executor in executors:
        table.add_row(f"[bold]executor {executor.pop('address')}[/]", "")
        for name, value in executor.items():
            table.add_row(f"  {name}", _plain(value))
    Console().print(table)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(v)}" for name, v in value.items() if v is not None) or "-"
    if isinstance(value, tuple | list):
        return ("; " if any(isinstance(v, dict) for v in value) else ", ").join(map(_plain, value)) or "-"
    return "-" if value is None else str(value)
