"""The simulator against the service: the same arrivals make the same steps.

The engine loop drives the CPU executor (a tiny random Llama) over gRPC. Arrivals are such that no step depends on how
long another took: a wave of requests that are all there at once, and the next wave when everything has settled.
"""

import asyncio
import dataclasses

import numpy as np
import pytest

from common.messages import ExecutorInfo
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import StepSeen, WatchSteps
from scheduler_svc.simulate.simulation import Setup, Simulation
from scheduler_svc.simulate.step_model import Cost, Shape, StepModel
from scheduler_svc.simulate.trace import Prompts, Trace
from tests.contract.executors import tiny_runner
from tests.integration.engine_harness import engine
from tests.integration.protocol_harness import run, serving

WAVE_NS = 10**12
SEED = 3

Steps = list[tuple[int, int, int, int]]


def waves(sizes: tuple[int, ...], *, longest: int, shared: int, seed: int) -> Trace:
    """Prompts and outputs of all lengths up to `longest` together, a third of them with a shared prefix."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    prompt = rng.integers(1, longest - 8, size=n)
    prefix = np.where((np.arange(n) % 3 == 0) & (prompt > shared), 0, -1)
    return Trace(
        arrival_ns=np.repeat(np.arange(len(sizes)) * WAVE_NS, sizes),
        prompt_tokens=prompt,
        output_tokens=np.minimum(rng.integers(1, longest, size=n), longest - prompt),
        prefix=prefix,
        prefix_tokens=np.where(prefix == 0, shared, 0),
        tenant=np.arange(n) % 3,
        priority=rng.integers(0, 3, size=n),
        deadline_ns=np.zeros(n, dtype=np.int64),
        tenants=("a", "b", "c"),
    )


def simulated(trace: Trace, config: CoreConfig, info: ExecutorInfo) -> tuple[Steps, int]:
    model = StepModel(
        name="tiny",
        origin="derived",
        costs=(Cost(base_us=100.0, decode_row_us=3.0, prefill_token_us=7.0),),
        executor=Shape(
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=info.max_num_seqs,
            max_tokens_per_step=info.max_tokens_per_step,
            max_context=info.max_context,
            vocab_size=info.vocab_size,
        ),
        conditions={},
    )
    same = dataclasses.replace(
        info, model_id="tiny", model_hash="tiny", eos_ids=(), buckets=(), features=(), numerics="fast", dtype="float32"
    )
    simulation = Simulation(config, trace, model, Setup(seed=SEED))
    assert dataclasses.replace(model.info(), max_output_bytes=same.max_output_bytes) == dataclasses.replace(
        same, max_message_bytes=model.info().max_message_bytes, max_draft_tokens=0
    )
    steps = simulation.run().steps.rows()
    names = ["decode_tokens", "prefill_tokens", "num_sequences", "free_blocks"]
    return [tuple(row) for row in steps[names].tolist()], simulation.stats.preemptions


def served(trace: Trace, config: CoreConfig, num_blocks: int) -> tuple[Steps, int, ExecutorInfo]:
    runner = tiny_runner(num_blocks=num_blocks)
    prompts = Prompts(trace, runner.info.vocab_size, SEED)
    core = Scheduler(config)

    async def main() -> tuple[Steps, int, ExecutorInfo]:
        async with (
            serving(runner) as executor,
            engine(executor.address, depth=config.pipeline_depth, core=core) as (loop, worker),
        ):
            await worker.ready()
            worker.port.send(WatchSteps(worker.worker_id, True))
            for arrival in np.unique(trace.arrival_ns).tolist():
                keys = np.flatnonzero(trace.arrival_ns == arrival).tolist()
                for key in keys:
                    worker.port.send(prompts.submit(key, 0))
                await worker.done(keys)
                await worker.until(lambda: not any(e.in_flight_steps for e in loop.stats().executors))
            assert not worker.errors
            assert [len(worker.tokens[key]) for key in range(len(trace))] == trace.output_tokens.tolist()
            seen = [message for message in worker.other if isinstance(message, StepSeen)]
            steps = [(s.decode_tokens, s.prefill_tokens, s.num_sequences, s.free_blocks) for s in seen]
            return steps, core.stats().preemptions, runner.info

    return run(main(), 100.0)


@pytest.mark.parametrize(
    ("config", "num_blocks", "preempts"),
    [
        (CoreConfig(pipeline_depth=1), 200, False),
        (CoreConfig(pipeline_depth=2, max_prefill_chunk=9), 200, False),
        (CoreConfig(pipeline_depth=2, enable_prefix_cache=False), 24, True),
        (CoreConfig(pipeline_depth=3, policy="priority", max_num_batched_tokens=17), 24, True),
        (CoreConfig(pipeline_depth=4, max_num_seqs=5), 20, True),
        (CoreConfig(policy="fair", tenant_weights={"b": 3.0}, max_partial_prefills=2), 200, False),
    ],
    ids=["depth 1", "chunks", "no cache", "priority", "few blocks", "fair"],
)
def test_the_same_arrivals_make_the_same_steps(config: CoreConfig, num_blocks: int, preempts: bool) -> None:
    trace = waves((20, 1, 12), longest=60, shared=8, seed=11)
    real, preemptions, info = served(trace, config, num_blocks)
    steps, simulated_preemptions = simulated(trace, config, info)
    assert len(real) > 30
    assert steps == real
    assert simulated_preemptions == preemptions
    assert (preemptions > 0) == preempts


def test_the_service_gives_tokens_that_mean_something() -> None:
    """Guards the comparison: the real executor's tokens are not the modelled one's zeros."""
    trace = waves((3,), longest=60, shared=8, seed=2)
    runner = tiny_runner()
    prompts = Prompts(trace, runner.info.vocab_size, SEED)

    async def main() -> set[int]:
        async with serving(runner) as executor, engine(executor.address) as (_, worker):
            await worker.ready()
            for key in range(3):
                worker.port.send(prompts.submit(key, 0))
            await asyncio.wait_for(worker.done([0, 1, 2]), 60)
            return {token for tokens in worker.tokens.values() for token in tokens}

    assert len(run(main(), 90.0)) > 3
