"""The scheduler's core after ten thousand steps of requests that come, go and are cancelled is as large as before.

A sample runs always; NO_GROWTH_STEPS=10000 for all of them.
"""

import gc
import os
import random
import sys
from collections import deque

from common.messages import Sampling, StepResult, Welcome, u32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import Submit
from scheduler_svc.simulate.modelled_executor import ModelledExecutor
from scheduler_svc.simulate.step_model import Cost, Shape, StepModel

STEPS = int(os.environ.get("NO_GROWTH_STEPS", "2000"))
WARM_STEPS = 3000
STEP_NS = 1_000_000
LIVE = 24
# One small object kept for each step would be STEPS of them.
MAX_BLOCKS = STEPS // 5

SHAPE = Shape(block_size=4, num_blocks=64, max_num_seqs=16, max_tokens_per_step=64, max_context=64, vocab_size=1000)
MODEL = StepModel(name="flat", origin="derived", costs=(Cost(base_us=1000.0),), executor=SHAPE, conditions={})


class Scene:
    """One core whose cache is always too small, on an executor that, like the scene, keeps nothing of a step."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.core = Scheduler(CoreConfig(pipeline_depth=2, max_prefill_chunk=16))
        self.executor = ModelledExecutor(MODEL)
        self.executor_id = self.core.add_executor("modelled")
        start = self.core.begin_epoch(self.executor_id)
        welcome = Welcome(1, MODEL.info(), 2, False, 0, 0)
        self.core.executor_up(self.executor_id, start.epoch, welcome, 0)
        self.flight: deque[StepResult] = deque()
        self.now_ns = self.steps = self.key = 0

    def step(self) -> None:
        self.now_ns += STEP_NS
        while self.core.num_live < LIVE:
            self.submit()
        if self.steps % 50 == 0:
            self.core.cancel(self.key - self.rng.randrange(LIVE), self.now_ns)
        while len(self.flight) < 2 and (record := self.core.schedule(self.executor_id, self.now_ns)):
            self.flight.append(self.executor.execute(record.plan, self.now_ns).result)
            self.steps += 1
        self.core.update(self.executor_id, self.flight.popleft(), self.now_ns)

    def submit(self) -> None:
        self.key += 1
        rng = self.rng
        prompt = [rng.randrange(3)] * 8 + [rng.randrange(3, 900) for _ in range(rng.randint(1, 20))]
        sampling = Sampling(seed=self.key, max_tokens=rng.randint(1, 30), temperature=0.8, ignore_eos=True)
        self.core.submit(
            Submit(
                key=self.key,
                request_id=f"r{self.key}",
                prompt=u32(prompt),
                sampling=sampling,
                arrival_ns=self.now_ns,
                tenant=f"tenant {self.key % 40}",
            ),
            self.now_ns,
        )


def test_the_core_does_not_grow_with_steps() -> None:
    scene = Scene()
    while scene.steps < WARM_STEPS:
        scene.step()
    gc.collect()
    before, submitted = sys.getallocatedblocks(), scene.key
    while scene.steps < WARM_STEPS + STEPS:
        scene.step()
    gc.collect()
    more = sys.getallocatedblocks() - before
    assert scene.key - submitted > STEPS // 20, "requests came"
    assert more < MAX_BLOCKS, f"{more} more blocks of Python's after {STEPS} steps and {scene.key - submitted} requests"
