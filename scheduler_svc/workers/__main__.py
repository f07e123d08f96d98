"""`python -P -m scheduler_svc.workers FD`: started by the scheduler, for `--api-workers`; FD is its end of a socket."""

import logging
import sys


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not argv[0].isdecimal():
        sys.stderr.write("stepwire: api workers are started by the scheduler; see --api-workers\n")
        return 2
    from scheduler_svc.assemble import assemble
    from scheduler_svc.workers.process import run_worker

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s api worker %(process)d %(levelname)s %(message)s", stream=sys.stderr
    )
    return run_worker(int(argv[0]), assemble)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
