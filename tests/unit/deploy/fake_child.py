"""A stand-in for a service. Says what happens to it in its log directory, one file per start.

    python fake_child.py NAME DIRECTORY BEHAVIOUR

BEHAVIOUR: serve · unready · exit:STATUS · ignore-term · slow-term
"""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    name, directory, behaviour = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    starts = len(list(directory.glob(f"{name}.start.*")))
    (directory / f"{name}.start.{starts}").write_text(str(os.getpid()))
    sys.stdout.write(f"{name} starting\n")
    sys.stdout.flush()
    if behaviour.startswith("exit:"):
        sys.exit(int(behaviour.partition(":")[2]))

    def stop(number: int, frame: object) -> None:
        if behaviour == "slow-term":
            time.sleep(0.5)
        with (directory / "stops").open("a") as stops:
            stops.write(f"{name}\n")
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "ignore-term" else stop)
    if behaviour != "unready":
        (directory / f"{name}.ready.{starts}").touch()
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        signal.sigtimedwait([], 0.5)


main()
