"""Steps of the executor alone, in this process and one thread, timed by CPU time: for machines that others use too."""

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from bench.step_batch import Lengths
from common.messages import ExecutorInfo, Hello, Sampling, Welcome, u32
from common.model_files.catalog import resolve
from executor_svc.config import ExecutorConfig
from executor_svc.environment import prepare_environment
from executor_svc.load_progress import StartProgress
from executor_svc.step_executor import StepExecutor
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import Submit
from scheduler_svc.simulate.step_model import Shape

if TYPE_CHECKING:
    from executor_svc.runner import Runner

Line = dict[str, object]


def build(
    model: str,
    *,
    threads: int = 1,
    weights: str = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    num_blocks: int = 0,
    pipeline_depth: int = 4,
) -> "Runner":
    """The CPU executor as it serves by default. `weights`: as weight_dtype; "torch": torch's own operations, where
    others run in the CPU kernels. `num_blocks`: 0: measured. Raises ConfigError and ModelError."""
    in_torch = weights == "torch"
    config = ExecutorConfig(
        model=model, load_format=load_format, device="cpu", threads=threads, num_blocks=num_blocks,
        weight_dtype="auto" if in_torch else weights,  # type: ignore[arg-type]  # checked there
        attention_backend="torch" if in_torch else "auto",
    )  # fmt: skip
    prepare_environment(config.numerics)
    from executor_svc.assemble import build_executor  # torch, once the environment is prepared

    progress = StartProgress()
    files = resolve(config.model, progress, load_format=config.load_format)
    return build_executor(config, files, pipeline_depth, progress)


def steps_of(executor: StepExecutor, levels: tuple[int, ...], seconds: float, longest: tuple[int, int]) -> list[Line]:
    """Lines of a file for `--fit`. `seconds` of CPU time are spent on each level of concurrency; `longest`: prompt and
    output."""
    core = Scheduler(CoreConfig(pipeline_depth=1, max_prefill_chunk=256))
    executor_id = core.add_executor("here")
    start = core.begin_epoch(executor_id)
    executor.begin_epoch(Hello(bytes(16), start.epoch, 1, 0, 0))
    core.executor_up(executor_id, start.epoch, Welcome(executor.incarnation, executor.info, 1, False, 0, 0), 0)
    lengths = Lengths(executor.info.num_rows)
    submits = _submits(executor.info.vocab_size, longest)
    found: list[Line] = []
    for level in levels:
        until = time.process_time() + seconds
        while time.process_time() < until or core.num_live:
            while core.num_live < level and time.process_time() < until:
                core.submit(next(submits), 0)
            record = core.schedule(executor_id, 0)
            assert record is not None
            context = lengths.batch(record.plan).context_tokens
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
