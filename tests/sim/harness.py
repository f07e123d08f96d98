"""Drives the real scheduler against the toy executor, one event at a time, with time turned by hand."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.clock import ManualClock
from common.errors import StepwireError
from common.messages import ExecutorInfo, Hello, PlanError, Sampling, StepPlan, StepResult, Welcome, u32
from executor_svc.step_executor import PendingStep, PlanRefused
from scheduler_svc.choice_seed import choice_seed
from scheduler_svc.core import invariants
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.forks import choices
from scheduler_svc.core.outcome import Ending, StepOutcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import WORKER_SHIFT, Child, Extras, FinishReason, Submit
from scheduler_svc.observer import StepRecord
from tests.fakes.toy_executor import ToyExecutor, crashed, toy_info
from tests.fakes.toy_tokens import expected_tokens


class NeverFewer:
    """Within an epoch no admitted sequence's computed or known tokens become fewer."""

    def __init__(self) -> None:
        self._before: tuple[int, NDArray[np.int64]] = 0, np.zeros((3, 0), dtype=np.int64)

    def check(self, executor: ExecutorState) -> None:
        if not executor.up:
            return
        rows = executor.rows
        now = np.stack([rows.admission, rows.prefilled, rows.low])
        epoch, before = self._before
        if epoch == executor.epoch:
            same = (before[0] == now[0]) & (now[0] > 0)
            assert (now[:, same] >= before[:, same]).all(), "computed or known tokens became fewer"
        self._before = executor.epoch, now


@dataclass
class Client:
    """What one request's caller has seen."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    extras: list[Extras] = field(default_factory=list)
    reason: FinishReason | None = None
    error: StepwireError | None = None
    cached: int = 0
    ends: int = 0
    silent: bool = False  # cancelled or finished by the worker: nothing may come any more


class Sim:
    """One scheduler, one toy executor (replaced when it crashes), clients by key. Every call checks the invariants."""

    def __init__(
        self,
        config: CoreConfig | None = None,
        info: ExecutorInfo | None = None,
        *,
        eos_chance: float = 0.0,
        beside: "Sim | None" = None,
    ) -> None:
        """`beside`: the scheduler, its clients and the time are that one's, which alone submits."""
        self.clock: ManualClock = beside.clock if beside else ManualClock()
        self.scheduler: Scheduler = beside.scheduler if beside else Scheduler(config or CoreConfig())
        self.clients: dict[int, Client] = beside.clients if beside else {}
        self.toy = ToyExecutor(info or toy_info(), eos_chance=eos_chance)
        self.executor_id = self.scheduler.add_executor(f"toy:{len(self.scheduler.executors)}")
        self.pending: deque[tuple[StepRecord, PendingStep | PlanError]] = deque()
        self.tampered = False  # in this epoch
        self.records: list[StepRecord] = []
        self.corrupt_reads = self.limbo_violations = 0
        self.stale: set[int] = set()  # blocks that hold what was computed before the last cache reset
        self.never_fewer = NeverFewer()
        self.looks_ahead: Callable[[int], bool] = lambda step_id: step_id % 2 == 0  # nothing may depend on it
        self._counter = 0
        self.connect()

    # ----------------------------------------------------------------------------------------------------- executor

    @property
    def now_ns(self) -> int:
        return self.clock.monotonic_ns()

    @property
    def executor(self) -> ExecutorState:
        return self.scheduler.executors[self.executor_id]

    @property
    def depth(self) -> int:
        return self.scheduler.config.pipeline_depth

    def connect(self) -> None:
        start = self.scheduler.begin_epoch(self.executor_id)
        hello = Hello(
            scheduler_id=bytes(16),
            epoch=start.epoch,
            pipeline_depth=self.depth,
            monotonic_ns=self.now_ns,
            wall_ns=self.clock.wall_ns(),
            keep_kv=start.keep_kv,
            known_incarnation=start.known_incarnation,
        )
        kept = self.toy.begin_epoch(hello)
        self.tampered = False
        self.pending.clear()
        welcome = Welcome(self.toy.incarnation, self.toy.info, self.depth, kept, self.now_ns, self.clock.wall_ns())
        self._end(self.scheduler.executor_up(self.executor_id, start.epoch, welcome, self.now_ns))
        self.check()

    def pass_time(self, milliseconds: float) -> None:
        """The clock moves on, and what ran out of time ends."""
        self.clock.advance_ns(int(milliseconds * 1e6))
        self._end(self.scheduler.expire(self.now_ns))
        self.check()

    def disconnect(self) -> None:
        """The stream breaks; results in flight are lost."""
        self.pending.clear()
        self._end(self.scheduler.executor_down(self.executor_id, self.now_ns))
        self.check()

    def replace_executor(self, info: ExecutorInfo | None = None) -> None:
        """The executor's process dies and another takes its place (without a connection yet)."""
        self.corrupt_reads += self.toy.corrupt_reads
        self.limbo_violations += self.toy.limbo_violations
        self.toy = crashed(self.toy, info)

    # ----------------------------------------------------------------------------------------------------- requests

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        worker: int = 0,
        request_id: str = "",
        n: int = 1,
        **fields: object,
    ) -> Submit:
        """A Submit for `n` choices, with keys in a row; `fields` of Submit or, by their own names, of Sampling."""
        self._counter += n
        first, key = self._counter - n + 1, worker << WORKER_SHIFT | self._counter - n + 1
        own = {name: fields.pop(name) for name in tuple(fields) if name in Submit.__dataclass_fields__}
        values: dict[str, object] = {"seed": first, "max_tokens": max_tokens, "temperature": 0.8, **fields}
        return Submit(
            key=key,
            request_id=request_id or f"r{first}",
            prompt=u32(prompt),
            sampling=Sampling(**values),  # type: ignore[arg-type]
            arrival_ns=self.now_ns,
            children=tuple(Child(key + i, choice_seed(first, i)) for i in range(1, n)),
            **own,  # type: ignore[arg-type]
        )

    def submit(self, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> int:
        """Returns the key, of choice 0 where there are several. Raises what Scheduler.submit raises."""
        return self.offer(self.request(prompt, max_tokens, **fields))  # type: ignore[arg-type]

    def offer(self, request: Submit) -> int:
        self.scheduler.submit(request, self.now_ns)
        for choice in choices(request):
            self.clients[choice.key] = Client(choice)
        self.check()
        return request.key

    def cancel(self, key: int) -> bool:
        found = self.scheduler.cancel(key, self.now_ns)
        self.clients[key].silent = True
        self.check()
        return found

    def finish(self, key: int, token_count: int) -> bool:
        found = self.scheduler.finish(key, token_count, self.now_ns)
        self.clients[key].silent = True
        self.check()
        return found

    def reset_cache(self) -> tuple[int, int]:
        counts = self.scheduler.reset_cache()
        executor = self.executor
        self.stale = {block for row in range(len(executor.rows)) for block in executor.rows.blocks(row).tolist()}
        assert not executor.pool.cache or len(executor.pool.cache) == 0
        self.check()
        return counts

    # -------------------------------------------------------------------------------------------------------- steps

    def plan(self, tamper: Callable[[StepPlan], StepPlan] | None = None) -> StepRecord | None:
        """Plans and sends one step, if there is one. A plan refused untampered is an error of the core."""
        record = self.scheduler.schedule(self.executor_id, self.now_ns)
        self.check()
        if record is not None:
            if self.looks_ahead(record.plan.step_id):
                self.scheduler.look_ahead(self.executor_id)
                self.check()
            self.records.append(record)
            self._check_stale(record.plan)
            plan = tamper(record.plan) if tamper else record.plan
            self.tampered |= plan is not record.plan
            try:
                self.pending.append((record, self.toy.execute(plan, self.now_ns)))
            except PlanRefused as refused:
                assert self.tampered, refused
                self.pending.append((record, refused.error))
        return record

    def deliver(self) -> StepOutcome | None:
        """The result of the oldest step arrives. None: nothing was in flight, or the step failed (epoch over)."""
        if not self.pending:
            return None
        _, step = self.pending.popleft()
        error = step if isinstance(step, PlanError) else None
        try:
            if not isinstance(step, PlanError):
                return self.update(step.wait())
        except PlanRefused as refused:
            error = refused.error
        assert error is not None
        self._end(self.scheduler.plan_failed(self.executor_id, error, self.now_ns))
        while self.pending:  # what comes after the first error changes nothing
            _, later = self.pending.popleft()
            if isinstance(later, PlanError):
                assert self.scheduler.plan_failed(self.executor_id, later, self.now_ns) == ()
        self.check()
        return None

    def update(self, result: StepResult) -> StepOutcome:
        outcome = self.scheduler.update(self.executor_id, result, self.now_ns)
        self._receive(outcome)
        self.check()
        return outcome

    def fill(self) -> int:
        """Plans until the pipeline is full or there is nothing to do."""
        count = 0
        while self.scheduler.can_schedule(self.executor_id) and self.plan() is not None:
            count += 1
        return count

    def run(self, max_steps: int = 10_000) -> int:
        """Until nothing is left to do. Returns the number of results."""
        steps = 0
        while True:
            if not self.scheduler.is_ready and not self.scheduler.is_draining:
                self.connect()
            if not self.fill() and not self.pending:
                break
            self.deliver()
            steps += 1
            assert steps < max_steps, f"no end after {steps} steps: {self.scheduler.stats()}"
        assert self.scheduler.num_live == 0, f"stuck: {self.scheduler.stats()}"
        return steps

    def _receive(self, outcome: StepOutcome) -> None:
        finished = {e.key: e.reason for e in outcome.endings if e.reason is not None}
        seen: set[int] = set()
        for worker, batch in outcome.batches.items():
            offset = 0
            columns = zip(batch.keys, batch.counts, batch.reasons, batch.cached, strict=True)
            for entry, (key, count, reason, cached) in enumerate(columns):
                client = self.clients[int(key)]
                assert int(key) >> WORKER_SHIFT == worker and int(key) not in seen
                assert not client.silent and not client.ends, "something came after the end"
                seen.add(int(key))
                client.tokens += batch.tokens[offset : offset + int(count)].tolist()
                client.cached = int(cached)
                offset += int(count)
                if entry in batch.extras:
                    client.extras.append(batch.extras[entry])
                assert finished.get(int(key), 0) == reason
            assert offset == len(batch.tokens)
        self._end(outcome.endings)

    def _end(self, endings: Sequence[Ending]) -> None:
        for ending in endings:
            client = self.clients[ending.key]
            client.ends += 1
            client.reason, client.error = ending.reason, ending.error
            assert client.ends == 1 and not client.silent, "a request ended twice"
            assert client.submit.request_id == ending.request_id

    # ------------------------------------------------------------------------------------------------------- checks

    def _check_stale(self, plan: StepPlan) -> None:
        """What was computed before a cache reset is never found again. (A choice may fork from one that runs.)"""
        if not self.stale:
            return
        rows, size = self.executor.rows, self.toy.info.block_size
        self.stale.difference_update(plan.grant_blocks.tolist())
        for admit in plan.admit:
            num_found = admit.computed_len // size
            found = set(admit.blocks[:num_found].tolist())
            siblings = self.scheduler.keys_of(self.clients[int(rows.keys[admit.row])].submit.request_id)
            assert len(siblings) > 1 or not found & self.stale, "a block from before the reset was found"
            self.stale.difference_update(admit.blocks[num_found:].tolist())

    def check(self) -> None:
        self.never_fewer.check(self.executor)
        invariants.check(self.scheduler)

    def expected(self, key: int) -> list[int]:
        request = self.clients[key].submit
        limit = min(self.toy.info.max_context, self.toy.info.num_blocks * self.toy.info.block_size)
        return expected_tokens(
            request.prompt.tolist(),
            request.sampling,
            vocab_size=self.toy.info.vocab_size,
            eos_ids=self.toy.info.eos_ids,
            eos_chance=self.toy.eos_chance,
            max_context=limit,
        )

    def assert_tokens(self) -> None:
        """Finished requests have exactly the undisturbed tokens, all others a head of them."""
        assert self.corrupt_reads + self.toy.corrupt_reads == 0, "a block held other tokens than its row"
        assert self.limbo_violations + self.toy.limbo_violations == 0
        for key, client in self.clients.items():
            expected = self.expected(key)
            if client.reason is not None:
                assert client.tokens == expected, f"request {key}"
                assert client.reason == self._reason(client, expected)
            else:
                assert client.tokens == expected[: len(client.tokens)], f"request {key}"

    def _reason(self, client: Client, tokens: list[int]) -> FinishReason:
        s, last = client.submit.sampling, tokens[-1]
        if len(tokens) > s.min_tokens and last in self.toy.info.eos_ids and not s.ignore_eos:
            return FinishReason.EOS
        if len(tokens) > s.min_tokens and last in s.stop_ids:
            return FinishReason.STOP_TOKEN
        full = s.max_tokens and len(tokens) == s.max_tokens
        return FinishReason.MAX_TOKENS if full else FinishReason.CONTEXT

    def assert_all_free(self) -> None:
        """Rows and blocks are back at their start values, on both sides."""
        stats = self.scheduler.stats().executors[0]
        assert stats.free_rows == stats.num_rows == self.toy.info.num_rows
        assert stats.free_blocks == stats.num_blocks == self.toy.info.num_blocks
        assert stats.limbo_blocks == 0 and stats.in_flight_steps == 0
        assert self.toy.rows_in_use == 0
