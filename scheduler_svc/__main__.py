"""`python -P -m scheduler_svc`: the scheduler process. Flags: see scheduler_svc/config.py or --help."""

import logging
import sys
from pathlib import Path

import common


def refuse_foreign_common() -> None:
    """Leaves with SystemExit unless `common` is this checkout's. Stands in both services: a foreign one could not be
    asked for it."""
    if Path(common.__file__ or "").resolve().parent != Path(__file__).resolve().parent.parent / "common":
        sys.stderr.write(
            f"stepwire scheduler: the package `common` comes from {common.__file__}, not from this checkout: start it "
            "with `python -P` in an environment of its own\n"
        )
        raise SystemExit(2)


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 after a drain, EXIT_CONFIG when starting again can not help, else 1."""
    import uvloop

    from common.config import EXIT_CONFIG
    from common.errors import ConfigError, ModelError
    from common.serving import begin
    from scheduler_svc.app import serve
    from scheduler_svc.assemble import assemble
    from scheduler_svc.config import SchedulerConfig

    config = begin(SchedulerConfig, argv).config
    log = logging.getLogger(__name__)
    try:
        parts = assemble(config, serves=not config.api_workers)
    except (ConfigError, ModelError) as error:
        log.error("%s", error.message)
        return EXIT_CONFIG
    try:
        return uvloop.run(serve(config, parts))
    finally:
        parts.tracing.shutdown()


if __name__ == "__main__":
    refuse_foreign_common()
    from common.standard_streams import end_on_interrupt, fill_standard_streams

    fill_standard_streams()
    end_on_interrupt()
    from scheduler_svc.huge_heap import exec_with_huge_heap

    exec_with_huge_heap()
    sys.exit(main(sys.argv[1:]))
