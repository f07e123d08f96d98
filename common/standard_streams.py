"""Standard input, output and error as a program may be given them: closed, or with nobody reading. Loads nothing."""

import os
import signal
import sys
from typing import Final

_MODES: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def fill_standard_streams() -> None:
    """Opens /dev/null for those that the caller had closed (`2>&-`). Else what is opened next has their number, and is
    written what libraries say on standard error. Call first, before anything is open."""
    for number, (name, mode) in enumerate(_MODES):
        if getattr(sys, name) is None:
            leave_standard_stream(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process


def leave_standard_stream(number: int) -> None:
    """Nobody is at its other end: from now on it is /dev/null, here and in children, so that neither a later write nor
    the exit fails."""
    opened = os.open(os.devnull, os.O_RDWR)
    os.dup2(opened, number)
    if opened != number:  # else it was closed
        os.close(opened)
    os.set_inheritable(number, True)


def end_on_interrupt() -> None:
    """Until the program hears Ctrl-C itself, it ends by it as others do, without the traceback of some import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
