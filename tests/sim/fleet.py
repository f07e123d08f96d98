"""A scheduler with one to three toy executors, and everything that may happen to them as an operation.

Each operation draws what it needs from a `random.Random`, so that the same operations serve hypothesis (which hands in
one that it can shrink) and the plain random driver, at a tenth of the cost.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from common.errors import (
    DeadlinePassed,
    Draining,
    DuplicateRequest,
    Overloaded,
    ProtocolError,
    StepwireError,
    TooLarge,
)
from common.messages import ExecutorInfo, PlanError, PlanErrorCode, StepPlan, StepResult, u32
from scheduler_svc.core import invariants
from scheduler_svc.core.executor_state import context_limit
from scheduler_svc.messages import Submit
from scheduler_svc.observer import StepRecord
from tests.sim.fleet_end import check_client
from tests.sim.fleet_setting import VOCAB, Setting, draw_info
from tests.sim.harness import Client, Sim

MAX_LIVE = 40
PROMPTS = [[random.Random(family).randrange(3, VOCAB) for _ in range(60)] for family in range(3)]


class Member(Sim):
    """One of the executors. Of all that the scheduler says, each call checks what is cheap to check, and every
    `check_every`th, all invariants."""

    def __init__(self, fleet: "Fleet", info: ExecutorInfo, beside: "Sim | None") -> None:
        self._fleet = fleet
        super().__init__(fleet.setting.config, info, eos_chance=fleet.setting.eos_chance, beside=beside)
        self.records = deque(maxlen=1)  # type: ignore[assignment]

    def check(self) -> None:
        self._fleet.check()


class Fleet:
    """See the module. `end` plays to the end and says that all was right."""

    def __init__(self, setting: Setting, check_every: int = 1) -> None:
        self.setting = setting
        self.members: list[Member] = []
        self.num_steps = 0
        self._check_every, self._checks = check_every, 0
        self._contexts: set[int] = set()
        self._dropped_tokens = 0
        self._rows_failed = False
        for info in setting.infos:
            self.members.append(Member(self, info, self.members[0] if self.members else None))
            self._note_context()
        self.scheduler = self.members[0].scheduler
        self.clients = self.members[0].clients

    # ------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        if not self.members:
            return
        scheduler = self.members[0].scheduler
        assert scheduler.num_waiting + scheduler.num_running == scheduler.num_live, "a live request is nowhere"
        for member in self.members:
            member.never_fewer.check(member.executor)
            assert 0 <= member.executor.pool.available <= member.executor.pool.num_blocks
        self._checks += 1
        if self._checks % self._check_every == 0:
            invariants.check(scheduler)

    def _note_context(self) -> None:
        self._contexts |= {context_limit(e.info) for e in self.members[0].scheduler.executors if e.info is not None}

    def _footprint(self) -> tuple[object, ...]:
        s = self.scheduler.stats()
        return (s.requests_accepted, s.waiting, s.running, s.queued_tokens, s.prompt_tokens, self.scheduler.num_live)

    # ----------------------------------------------------------------------------------------------------- requests

    def submit(self, rng: random.Random) -> None:
        if self.scheduler.num_live >= MAX_LIVE:
            return
        pick, sim = rng.choice, self.members[0]
        deadline_ms = pick((0, 0, 0, 15, 500))
        prompt_logprobs = pick((0, 0, 0, 3))
        request = sim.request(
            PROMPTS[rng.randrange(3)][: rng.randrange(1, 61)],
            pick((0, 1, 2, 5, 12, 30)),
            n=pick((1, 1, 1, 2, 4)),
            worker=rng.randrange(2),
            min_tokens=pick((0, 0, 3)),
            ignore_eos=pick((True, False)),
            stop_ids=tuple(range(100, 100 + pick((0, 0, 2, 60, 99)))),
            raw_logits=pick((False, False, False, True)),
            num_logprobs=pick((0, 0, 2)),
            num_prompt_logprobs=prompt_logprobs,
            prompt_logprobs_from=1 if prompt_logprobs else 0,
            priority=rng.randrange(-2, 3),
            cache_salt=pick((b"", b"", b"s")),
            temperature=pick((0.0, 0.9)),
            tenant=pick(("", "a", "b")),
            deadline_ns=sim.now_ns + deadline_ms * 1_000_000 if deadline_ms else 0,
        )
        if rng.random() < 0.05 and self.scheduler.num_live:
            live = pick(self.scheduler.live_sequences()).request.request_id
            request = replace(request, request_id=live)
        before, is_double = self._footprint(), bool(self.scheduler.keys_of(request.request_id))
        try:
            sim.offer(request)
        except StepwireError as refused:
            assert self._footprint() == before, "a refused request left something"
            assert bool(self.scheduler.keys_of(request.request_id)) == is_double
            invariants.check(self.scheduler)
            assert self._may_be_refused(refused, request, is_double), refused
        else:
            assert not (is_double or self.scheduler.is_draining)

    def _may_be_refused(self, refused: StepwireError, request: Submit, is_double: bool) -> bool:
        config, infos = self.setting.config, [e.info for e in self.scheduler.executors if e.info is not None]
        match refused:
            case Draining():
                return self.scheduler.is_draining
            case DuplicateRequest():
                return is_double
            case TooLarge():
                too_wide = request.raw_logits and any(info.max_output_bytes < 4 * VOCAB for info in infos)
                return too_wide or len(request.prompt) > self.scheduler.limits()[1]
            case DeadlinePassed():
                return config.policy == "deadline" and request.deadline_ns > 0
            case Overloaded():
                few = self.scheduler.num_waiting + len(request.keys) <= config.max_queued_requests
                return refused.retry_after_ms > 0 and (bool(config.max_queued_tokens) or not few)
            case _:
                return False

    def _any(self, rng: random.Random) -> tuple[int, Client] | None:
        """Mostly someone who lives."""
        live = [sequence.key for sequence in self.scheduler.live_sequences()]
        keys = live if live and rng.random() < 0.9 else list(self.clients)
        if not keys:
            return None
        key = rng.choice(keys)
        return key, self.clients[key]

    def cancel(self, rng: random.Random) -> None:
        if (found := self._any(rng)) is not None:
            key, client = found
            was_live = not client.ends and not client.silent
            assert self.members[0].cancel(key) == was_live

    def finish(self, rng: random.Random) -> None:
        if (found := self._any(rng)) is not None:
            key, client = found
            count = max(0, len(client.tokens) - rng.randrange(3))
            was_live = not client.ends and not client.silent
            self._dropped_tokens += (len(client.tokens) - count) * was_live
            assert self.members[0].finish(key, count) == was_live

    def abort(self, rng: random.Random) -> None:
        if (found := self._any(rng)) is not None:
            for key in self.scheduler.keys_of(found[1].submit.request_id):
                assert self.members[0].cancel(key)

    def reset_cache(self, rng: random.Random) -> None:
        self.scheduler.reset_cache()
        for member in self.members:
            executor = member.executor
            member.stale = {block for row in range(len(executor.rows)) for block in executor.rows.blocks(row).tolist()}
            assert not executor.pool.cache or len(executor.pool.cache) == 0
        self.check()

    def drain(self, rng: random.Random) -> None:
        self.scheduler.drain()
        self.check()

    def time_passes(self, rng: random.Random) -> None:
        self.members[0].pass_time(rng.choice((0.5, 3, 12, 45)))

    # -------------------------------------------------------------------------------------------------------- steps

    def plan(self, rng: random.Random) -> None:
        member = rng.choice(self.members)
        can, was_in_flight = self.scheduler.can_schedule(member.executor_id), bool(member.pending)
        if (record := member.plan()) is not None:
            assert can or was_in_flight, "can_schedule said that nothing would come without a result"
            self._check_plan(member, record)

    def _check_plan(self, member: Member, record: StepRecord) -> None:
        self.num_steps += 1
        plan, info, config = record.plan, member.toy.info, self.setting.config
        assert plan.num_tokens <= min(info.max_tokens_per_step, config.max_num_batched_tokens or 1 << 30)
        assert len(plan.decode_rows) + len(plan.prefill_rows) <= min(info.max_num_seqs, config.max_num_seqs or 1 << 30)
        assert not config.max_prefill_chunk or plan.prefill_counts.max(initial=0) <= config.max_prefill_chunk
        if config.max_partial_prefills:
            assert len(member.executor.prefilling) <= config.max_partial_prefills

    def fill(self, rng: random.Random) -> None:
        for member in self.members:
            member.fill()

    def deliver(self, rng: random.Random) -> None:
        rng.choice(self.members).deliver()

    def go(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(1, 6)):
            for member in self.members:
                self.num_steps += member.fill()
                member.deliver()

    def preempt(self, rng: random.Random) -> None:
        """As if blocks had run out just now."""
        member = rng.choice(self.members)
        rows = np.flatnonzero(member.executor.rows.running & ~member.executor.rows.protected).tolist()
        if rows:
            self.scheduler._planner.preempt(member.executor, rng.choice(rows))
            self.check()

    # ------------------------------------------------------------------------------------------------------- faults

    def row_fails(self, rng: random.Random) -> None:
        member = rng.choice(self.members)
        rows = np.flatnonzero(member.executor.rows.running).tolist()
        leaders = [row for row in rows if (s := member.executor.rows.seqs[row]) is not None and s.followers]
        if rows:
            member.toy.fail_rows.add(rng.choice(leaders or rows))
            self._rows_failed = True

    def plan_fails(self, rng: random.Random) -> None:
        """The oldest step ends with an error: of any code, naming nobody or one of those it computes."""
        member = rng.choice(self.members)
        if not member.pending:
            return
        record, _ = member.pending[0]
        rows = [*record.plan.decode_rows.tolist(), *record.plan.prefill_rows.tolist()]
        row = rng.choice(rows) if rows and rng.random() < 0.5 else None
        admission_id = 0 if row is None else int(member.executor.rows.admission[row])
        code = rng.choice(list(PlanErrorCode))
        error = PlanError(record.plan.epoch, record.plan.step_id, code, "made up", "", row, admission_id)
        late = replace(error, epoch=error.epoch - 1)
        assert self.scheduler.plan_failed(member.executor_id, late, member.now_ns) == ()
        member.pending[0] = record, error
        member.deliver()
        assert not member.executor.up

    def bad_plan(self, rng: random.Random) -> None:
        """A plan that is damaged on its way is refused by the executor itself."""
        member = rng.choice(self.members)
        if member.executor.up:
            self.num_steps += member.plan(rng.choice((_with_wrong_sum, _with_wrong_admit))) is not None

    def device_fails(self, rng: random.Random) -> None:
        """The newest step in flight fails on the device; those before it stand."""
        member = rng.choice(self.members)
        if not member.pending:
            return
        member.toy.fail_steps.add(member.pending[-1][0].plan.step_id)
        member.tampered = True
        while member.pending:
            member.deliver()
        member.toy.fail_steps.clear()

    def wrong_result(self, rng: random.Random) -> None:
        """A result that is no answer changes nothing."""
        member = rng.choice(self.members)
        if not member.pending or isinstance(member.pending[0][1], PlanError):
            return
        plan: StepPlan = member.pending[0][0].plan
        rows = u32([len(member.executor.rows) + 1])
        wrong = rng.choice(
            (
                StepResult(plan.epoch, plan.step_id + 1),
                StepResult(plan.epoch + 1, plan.step_id),
                StepResult(plan.epoch, plan.step_id, emitted_rows=rows, tokens=u32([1])),
                StepResult(plan.epoch, plan.step_id, emitted_rows=rows, tokens=u32([VOCAB])),
            )
        )
        before = self.scheduler.stats()
        try:
            self.scheduler.update(member.executor_id, wrong, member.now_ns)
        except ProtocolError:
            assert self.scheduler.stats() == before
            self.check()
        else:
            raise AssertionError("a wrong result was taken")

    def disconnect(self, rng: random.Random) -> None:
        rng.choice(self.members).disconnect()

    def kill(self, rng: random.Random) -> None:
        """Another process, sometimes of another size, takes the executor's place."""
        member = rng.choice(self.members)
        member.disconnect()
        member.replace_executor(draw_info(rng) if rng.random() < 0.3 else None)

    def connect(self, rng: random.Random) -> None:
        member = rng.choice(self.members)
        member.toy.keep_kv = rng.random() < 0.8
        self._connect(member)

    def _connect(self, member: Member) -> None:
        others = [info for m in self.members if m is not member and (info := m.executor.info) is not None]
        own, known = member.toy.info, [*others, *([member.executor.info] if member.executor.info else [])]
        holds_less = bool(others) and (
            context_limit(own) < min(map(context_limit, known))
            or own.max_output_bytes < min(info.max_output_bytes for info in known)
        )
        try:
            member.connect()
        except ProtocolError:
            assert holds_less
            member.replace_executor(max(others, key=context_limit))
        else:
            assert not holds_less
            self._note_context()

    # -------------------------------------------------------------------------------------------------------- the end

    def end(self, max_rounds: int = 20_000) -> None:
        """Faults are over: everything ends, and what came out is right."""
        for member in self.members:
            member.toy.fail_rows.clear()
        for _ in range(max_rounds):
            count = 0
            for member in self.members:
                if not member.executor.up:
                    self._connect(member)
                count += member.fill() + len(member.pending)
                member.deliver()
            self.num_steps += count
            if not count and all(member.executor.up for member in self.members):
                break
        invariants.check(self.scheduler)
        assert self.scheduler.num_live == 0, f"stuck: {self.scheduler.stats()}"
        for member in self.members:
            # A row that failed computes no more, and who had forked from it reads that: it fails as well.
            is_read_right = member.corrupt_reads + member.toy.corrupt_reads == 0
            assert is_read_right or self._rows_failed, "a block held other tokens than its row"
            assert member.limbo_violations + member.toy.limbo_violations == 0
            e = self.scheduler.stats().executors[member.executor_id]
            assert e.free_rows == e.num_rows == member.toy.info.num_rows
            assert e.free_blocks == e.num_blocks == member.toy.info.num_blocks
            assert e.limbo_blocks == e.in_flight_steps == member.toy.rows_in_use == 0
        assert len(self.scheduler._expiry) == 0 and self.scheduler._queue.num_tokens == 0
        for key, client in self.clients.items():
            assert client.ends + client.silent >= 1, f"request {key} never ended"
            check_client(client, self.setting, self._contexts)
        stats = self.scheduler.stats()
        got = sum(len(client.tokens) for client in self.clients.values())
        assert stats.generated_tokens == got - self._dropped_tokens
        assert stats.preemptions <= self.setting.config.max_preemptions * len(self.clients)


def _with_wrong_sum(plan: StepPlan) -> StepPlan:
    return replace(plan, num_tokens=plan.num_tokens + 1)


def _with_wrong_admit(plan: StepPlan) -> StepPlan:
    if not plan.admit:
        return plan
    return replace(plan, admit=(replace(plan.admit[0], computed_len=plan.admit[0].length), *plan.admit[1:]))


Operation = Callable[[Fleet, random.Random], None]

OPERATIONS: Final[dict[str, tuple[Operation, float]]] = {
    "submit": (Fleet.submit, 22),
    "plan": (Fleet.plan, 22),
    "deliver": (Fleet.deliver, 22),
    "fill": (Fleet.fill, 6),
    "go": (Fleet.go, 8),
    "cancel": (Fleet.cancel, 3),
    "finish": (Fleet.finish, 2),
    "abort": (Fleet.abort, 1),
    "preempt": (Fleet.preempt, 3),
    "time_passes": (Fleet.time_passes, 3),
    "reset_cache": (Fleet.reset_cache, 0.5),
    "row_fails": (Fleet.row_fails, 1),
    "plan_fails": (Fleet.plan_fails, 1),
    "bad_plan": (Fleet.bad_plan, 0.5),
    "device_fails": (Fleet.device_fails, 0.5),
    "wrong_result": (Fleet.wrong_result, 1),
    "disconnect": (Fleet.disconnect, 0.7),
    "kill": (Fleet.kill, 0.5),
    "connect": (Fleet.connect, 4),
    "drain": (Fleet.drain, 0.03),
}
