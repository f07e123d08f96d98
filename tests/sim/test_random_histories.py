"""Any history of requests, results, crashes and faults: the invariants hold and no token changes.

vllm#57562: chunked prefill kills an asynchronous engine through a negative counter. Counters are among the invariants.
"""

import random
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import DeadlinePassed, Overloaded, SequenceFailed, TooLarge
from common.messages import StepPlan
from scheduler_svc.core.config import CoreConfig
from tests.fakes.toy_executor import toy_info
from tests.sim.fleet import check_extras
from tests.sim.harness import Sim

PROMPTS = [[random.Random(family).randrange(3, 500) for _ in range(60)] for family in range(3)]


def _wrong_sum(plan: StepPlan) -> StepPlan:
    return replace(plan, num_tokens=plan.num_tokens + 1)


def _wrong_admit(plan: StepPlan) -> StepPlan:
    if not plan.admit:
        return plan
    return replace(plan, admit=(replace(plan.admit[0], computed_len=plan.admit[0].length), *plan.admit[1:]))


class Histories(RuleBasedStateMachine):
    sim: Sim

    @initialize(
        depth=st.integers(1, 4),
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_slots=st.sampled_from([48, 80, 160, 800]),
        chunk=st.sampled_from([0, 1, 7]),
        budget=st.sampled_from([0, 5, 17]),
        seqs=st.sampled_from([0, 2, 5]),
        cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "fair", "deadline"]),
        max_preemptions=st.sampled_from([0, 1, 4]),
        eos=st.sampled_from([0.0, 0.1]),
        output=st.sampled_from([4000, 9000, 1 << 20]),
        long=st.sampled_from([0, 0, 9]),
        partial=st.sampled_from([0, 0, 1, 2]),
        aging=st.sampled_from([0, 50]),
        queue_ms=st.sampled_from([0, 0, 40]),
        itl=st.sampled_from([0.0, 3.0]),
    )
    def start(
        self,
        depth: int,
        block_size: int,
        num_slots: int,
        chunk: int,
        budget: int,
        seqs: int,
        cache: bool,
        policy: str,
        max_preemptions: int,
        eos: float,
        output: int,
        long: int,
        partial: int,
        aging: int,
        queue_ms: int,
        itl: float,
    ) -> None:
        config = CoreConfig(
            pipeline_depth=depth,
            max_prefill_chunk=chunk,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            enable_prefix_cache=cache,
            policy=policy,
            max_preemptions=max_preemptions,
            long_prefill_token_threshold=long,
            max_partial_prefills=partial,
            max_long_partial_prefills=1 if long else 0,
            priority_aging_ms=aging,
            tenant_weights={"b": 3.0},
            isolate_tenants=cache and not aging,
            max_queue_time_ms=queue_ms,
            target_itl_ms=itl,
        )
        info = toy_info(
            block_size=block_size,
            num_blocks=num_slots // block_size,
            max_blocks_per_row=256 // block_size,
            num_rows=24,
            max_num_seqs=8,
            max_output_bytes=output,
        )
        self.sim = Sim(config, info, eos_chance=eos)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 60),
        max_tokens=st.integers(0, 30),
        worker=st.integers(0, 1),
        min_tokens=st.sampled_from([0, 3]),
        ignore_eos=st.booleans(),
        num_stops=st.sampled_from([0, 0, 5, 300]),
        raw=st.sampled_from([False, False, True]),
        logprobs=st.sampled_from([0, 0, 2]),
        prompt_logprobs=st.sampled_from([0, 0, 3]),
        priority=st.integers(-2, 2),
        salt=st.sampled_from([b"", b"", b"s"]),
        greedy=st.booleans(),
        tenant=st.sampled_from(["", "a", "b"]),
        deadline_ms=st.sampled_from([0, 0, 15, 500]),
        n=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def submit(
        self,
        family: int,
        length: int,
        max_tokens: int,
        worker: int,
        min_tokens: int,
        ignore_eos: bool,
        num_stops: int,
        raw: bool,
        logprobs: int,
        prompt_logprobs: int,
        priority: int,
        salt: bytes,
        greedy: bool,
        tenant: str,
        deadline_ms: int,
        n: int,
    ) -> None:
        too_long = length > self.sim.scheduler.limits()[1]
        try:
            self.sim.submit(
                PROMPTS[family][:length],
                max_tokens,
                worker=worker,
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
                stop_ids=tuple(range(500, 500 + num_stops)),
                raw_logits=raw,
                num_logprobs=logprobs,
                num_prompt_logprobs=prompt_logprobs,
                prompt_logprobs_from=1,
                priority=priority,
                cache_salt=salt,
                temperature=0.0 if greedy else 0.9,
                tenant=tenant,
                deadline_ns=self.sim.now_ns + deadline_ms * 1_000_000 if deadline_ms else 0,
                n=n,
            )
        except TooLarge:
            assert too_long
        except DeadlinePassed:
            assert deadline_ms and self.sim.scheduler.config.policy == "deadline"

    @rule(data=st.data(), how=st.sampled_from(["cancel", "finish"]))
    @precondition(lambda self: self.sim.clients)
    def leave(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.sim.clients)))
        client = self.sim.clients[key]
        live = not client.ends and not client.silent
        found = self.sim.cancel(key) if how == "cancel" else self.sim.finish(key, max(0, len(client.tokens) - 1))
        assert found == live

    @rule(data=st.data())
    @precondition(lambda self: self.sim.clients)
    def abort(self, data: st.DataObject) -> None:
        """All choices of a request at once."""
        key = data.draw(st.sampled_from(sorted(self.sim.clients)))
        for own in self.sim.scheduler.keys_of(self.sim.clients[key].submit.request_id):
            assert self.sim.cancel(own)

    @rule()
    def reset_cache(self) -> None:
        self.sim.reset_cache()

    @rule(data=st.data())
    @precondition(lambda self: self.sim.scheduler.num_running)
    def preempt(self, data: st.DataObject) -> None:
        """As if blocks had run out just now."""
        executor = self.sim.scheduler.executors[0]
        rows = np.flatnonzero(executor.rows.running & ~executor.rows.protected).tolist()
        if rows:
            self.sim.scheduler._planner.preempt(executor, data.draw(st.sampled_from(rows)))
            self.sim.check()

    @rule(count=st.integers(1, 6))
    def plan(self, count: int) -> None:
        for _ in range(count):
            self.sim.plan()

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.sim.deliver()

    @rule(rounds=st.integers(1, 12))
    def go(self, rounds: int) -> None:
        for _ in range(rounds):
            self.sim.fill()
            self.sim.deliver()

    @rule(milliseconds=st.integers(1, 30))
    def time_passes(self, milliseconds: int) -> None:
        self.sim.pass_time(milliseconds)

    @rule()
    def connection_lost(self) -> None:
        self.sim.disconnect()

    @rule()
    def executor_killed(self) -> None:
        self.sim.disconnect()
        self.sim.replace_executor()

    @rule()
    def connect(self) -> None:
        self.sim.connect()

    @rule(bad=st.sampled_from([_wrong_sum, _wrong_admit]))
    def bad_plan(self, bad: object) -> None:
        self.sim.plan(_wrong_sum if bad is _wrong_sum else _wrong_admit)

    @rule()
    @precondition(lambda self: self.sim.pending)
    def device_fails(self) -> None:
        self.sim.toy.fail_steps.add(self.sim.pending[-1][0].plan.step_id)
        self.sim.tampered = True
        while self.sim.pending:
            self.sim.deliver()
        self.sim.toy.fail_steps.clear()

    @rule(data=st.data())
    @precondition(lambda self: self.sim.records and self.sim.scheduler.num_running)
    def row_fails(self, data: st.DataObject) -> None:
        rows = [s.row for s in self.sim.scheduler.live_sequences() if s.row >= 0]
        if rows:
            self.sim.toy.fail_rows.add(data.draw(st.sampled_from(rows)))

    @invariant()
    def tokens_are_undisturbed(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.toy.fail_rows.clear()
        self.sim.run()
        self.sim.assert_tokens()
        self.sim.assert_all_free()
        limit = self.sim.scheduler.config.max_preemptions
        for client in self.sim.clients.values():
            assert client.ends + client.silent >= 1, "a request never ended"
            if client.reason is None and client.ends:
                assert isinstance(client.error, SequenceFailed | TooLarge | DeadlinePassed | Overloaded)
            if client.reason is not None:
                check_extras(client)
        stats = self.sim.scheduler.stats()
        assert stats.preemptions <= limit * len(self.sim.clients), "preemptions per request are bounded"


Histories.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestHistories = Histories.TestCase
