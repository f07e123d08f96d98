"""The scheduler process without a model: `python -m tests.fakes.toy_scheduler_main --executors ADDR ...`.

Takes token ids only. Takes the scheduler's own flags, and `--break-at-step N` first: the core raises at that result.
`--worker FD`: one of its api workers.
"""

import logging
import sys

import uvloop

from common.config import load_config
from common.messages import StepResult
from scheduler_svc.api.served_model import ServedModel
from scheduler_svc.app import Parts, serve
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.workers.process import run_worker


def break_core_at(step_id: int) -> None:
    """From now on every Scheduler of this process has a bug."""
    update = Scheduler.update

    def broken(self: Scheduler, executor_id: int, result: StepResult, now_ns: int) -> StepOutcome:
        if result.step_id == step_id:
            raise ZeroDivisionError("a bug in the core")
        return update(self, executor_id, result, now_ns)

    Scheduler.update = broken  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    if argv[:1] == ["--worker"]:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(process)d %(levelname)s %(message)s")
        return run_worker(int(argv[1]), lambda config: Parts(ServedModel(), None))
    if argv[:1] == ["--break-at-step"]:
        break_core_at(int(argv[1]))
        argv = argv[2:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s scheduler %(levelname)s %(message)s")
    config = load_config(SchedulerConfig, argv).config
    worker_command = [sys.executable, "-P", "-m", "tests.fakes.toy_scheduler_main", "--worker"]
    return uvloop.run(serve(config, Parts(ServedModel(), None), worker_command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
