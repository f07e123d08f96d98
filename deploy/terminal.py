"""Writing to the terminal: messages to standard error, answers to standard output."""

import json
import sys

from common.standard_streams import leave_standard_stream


def err(text: str) -> None:
    """One message on standard error. Lost where it can not be written: nobody reads, the disk is full, the terminal is
    gone. What serves goes on without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        leave_standard_stream(sys.stderr.fileno())
    except OSError:
        return


def printable(text: str) -> str:
    """Text without control characters: neither a model's answer nor a log line may move a terminal's cursor."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def write_answer(text: str) -> None:
    """A piece of an answer, at once. Piped output is left as the model wrote it."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: object) -> None:
    """One line of JSON. Text stays readable; what a terminal could mistake is escaped by JSON itself."""
    print(json.dumps(value, ensure_ascii=False), flush=True)
