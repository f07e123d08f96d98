"""Steps of the executor alone, in this process and one thread, timed by CPU time: for machines that others use too."""

import random
import time
from collections.abc import Iterator

from common.messages import ExecutorInfo, Hello, Sampling, Welcome, u32
from common.model_files.catalog import resolve
from executor_svc.config import ExecutorConfig
from executor_svc.environment import prepare_environment
from executor_svc.load_progress import LogProgress
from executor_svc.step_executor import StepExecutor
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import Submit
from scheduler_svc.simulate.modelled_executor import ModelledExecutor
from scheduler_svc.simulate.step_model import Cost, Shape, StepModel

Line = dict[str, object]


def build(model: str) -> StepExecutor:
    """The CPU executor as it serves by default, but with one thread."""
    config = ExecutorConfig(model=model, device="cpu", threads=1)
    prepare_environment(config.numerics)
    from executor_svc.assemble import build_executor  # torch, once the environment is prepared

    progress = LogProgress()
    return build_executor(config, resolve(config.model, progress), 4, progress)


def steps_of(executor: StepExecutor, levels: tuple[int, ...], seconds: float, longest: tuple[int, int]) -> list[Line]:
    """Lines of a file for `--fit`. `seconds` of CPU time are spent on each level of concurrency; `longest`: prompt and
    output."""
    core = Scheduler(CoreConfig(pipeline_depth=1, max_prefill_chunk=256))
    executor_id = core.add_executor("here")
    start = core.begin_epoch(executor_id)
    executor.begin_epoch(Hello(bytes(16), start.epoch, 1, 0, 0))
    core.executor_up(executor_id, start.epoch, Welcome(executor.incarnation, executor.info, 1, False, 0, 0), 0)
    counting = ModelledExecutor(
        StepModel(
            name="none",
            origin="derived",
            costs=(Cost(base_us=1.0),),
            executor=shape_of(executor.info),
            conditions={},
        )
    )
    submits = _submits(executor.info.vocab_size, longest)
    found: list[Line] = []
    for level in levels:
        until = time.process_time() + seconds
        while time.process_time() < until or core.num_live:
            while core.num_live < level and time.process_time() < until:
                core.submit(next(submits), 0)
            record = core.schedule(executor_id, 0)
            assert record is not None
            context = counting.execute(record.plan, 0).context_tokens
            begin = time.process_time_ns()
            result = executor.execute(record.plan, 0).wait()
            spent = time.process_time_ns() - begin
            core.update(executor_id, result, 0)
            if record.decode_tokens + record.prefill_tokens:
                found.append(
                    {
                        "decode_tokens": record.decode_tokens,
                        "prefill_tokens": record.prefill_tokens,
                        "context_tokens": context,
                        "duration_us": spent / 1000,
                    }
                )
    return found


def shape_of(info: ExecutorInfo) -> Shape:
    return Shape(**{name: getattr(info, name) for name in Shape.model_fields})


def _submits(vocab: int, longest: tuple[int, int]) -> Iterator[Submit]:
    rng = random.Random(1)
    key = 0
    while True:
        key += 1
        prompt = u32([rng.randrange(vocab) for _ in range(rng.randint(8, longest[0]))])
        sampling = Sampling(seed=1, max_tokens=rng.randint(8, longest[1]), temperature=0.0, ignore_eos=True)
        yield Submit(key=key, request_id=str(key), prompt=prompt, sampling=sampling, arrival_ns=0)
