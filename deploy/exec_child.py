"""Becomes another command that dies with its parent.

    python -I -S exec_child.py PARENT_PID COMMAND...

Linux keeps the parent-death signal across exec, so the command itself needs to know nothing. This is a step of its own
because code between fork and exec must not run in a process with threads (gRPC's, here), and loads nothing heavy.
Elsewhere than on Linux it only execs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != parent:  # it died before prctl could notice
            raise SystemExit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"{command[0]}: {error.strerror}") from None


main()
