"""The core's public face: requests in, plans out, results in, tokens out.

Synchronous, deterministic and pure: no I/O, no clock, no threads. Same calls, same plans. Owner: the loop thread.
"""

from common.errors import Draining, DuplicateRequest, ProtocolError, SequenceFailed, StepwireError, Unavailable
from common.messages import ExecutorInfo, PlanError, PlanErrorCode, StepResult, Timings, Welcome
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core_stats import core_stats
from scheduler_svc.core.drain_rate import DEFAULT_RETRY_MS, DrainRate
from scheduler_svc.core.executor_state import ExecutorState, context_limit
from scheduler_svc.core.expiry import Expiry
from scheduler_svc.core.forks import choices
from scheduler_svc.core.outcome import Counters, Ending, EpochStart, StepOutcome
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.policies.registry import make_policy
from scheduler_svc.core.prefix_cache import tenant_salt
from scheduler_svc.core.request_checks import check_length, check_request, check_room, check_welcome
from scheduler_svc.core.results import Collected, batches, collect
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.suspects import MAX_PLAN_ERRORS, book_death, is_device_fault, named, present
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.messages import FinishReason, Stats, Submit
from scheduler_svc.observer import StepRecord

_ADMITTED_NEXT = 8  # a step seldom admits more while more wait than run


class Scheduler:
    """Holds every accepted request until it ends: all that is needed to rebuild its sequence on any executor."""

    def __init__(self, config: CoreConfig) -> None:
        """Raises ConfigError for an unknown policy."""
        self.config = config
        self._tenants = Tenants(config)
        self._policy = make_policy(config, self._tenants)
        self._queue = WaitingQueue(self._policy, config.long_prefill_token_threshold)
        self._counters = Counters()
        self._planner = Planner(config, self._policy, self._queue, self._first_admission, self._counters)
        self._executors: list[ExecutorState] = []
        self._drain_rate = DrainRate()
        self._expiry = Expiry(config, self._policy.refuses_late, self._queue, self._drain_rate, self._executors)
        self._tokens_seen = 0
        self._live: dict[int, Sequence] = {}
        self._requests: dict[str, Submit] = {}  # whole, by request id: those with a live choice
        self._orders = 0
        self._draining = False

    # ----------------------------------------------------------------------------------------------------- executors

    def add_executor(self, address: str) -> int:
        self._executors.append(ExecutorState(len(self._executors), address, self.config))
        return len(self._executors) - 1

    def begin_epoch(self, executor_id: int) -> EpochStart:
        """What the next Hello says. The former epoch, if it is still open, is over."""
        executor = self._executors[executor_id]
        self._close_epoch(executor)
        executor.epoch += 1
        keep = self.config.enable_prefix_cache and executor.incarnation != 0
        return EpochStart(executor.epoch, keep, executor.incarnation if keep else 0)

    def executor_up(self, executor_id: int, epoch: int, welcome: Welcome, now_ns: int) -> tuple[Ending, ...]:
        """The executor answered the Hello of `epoch`. Returns the requests that can no longer ever fit.

        Raises ProtocolError when `epoch` is not the one begun last, and when the executor holds less than all those
        known, or can less: requests accepted for those could end up on it.
        """
        executor = self._executors[executor_id]
        if epoch != executor.epoch or executor.up:
            raise ProtocolError(f"welcome: for epoch {epoch}, the present one is {executor.epoch}", field="epoch")
        known = [e.info for e in self._executors if e.info is not None]
        if known != [executor.info]:  # what it was itself counts: nothing was accepted that this could not serve
            check_welcome(welcome.info, known, self.config)
        is_other = executor.info is not None and executor.info != welcome.info
        executor.connect(welcome)
        max_context, _ = self.limits()
        for each in self._executors:
            each.context = max_context  # no sequence may grow past what any of them could take over
        endings: list[Ending] = []
        for sequence in tuple(self._live.values()) if is_other else ():
            if sequence.state != SequenceState.WAITING:
                continue
            try:
                check_request(sequence.request, welcome.info, self.config)
                check_length(sequence.length, max_context)
            except StepwireError as error:
                endings += self._fail(sequence, error)
        return tuple(endings)

    def executor_down(self, executor_id: int, now_ns: int) -> tuple[Ending, ...]:
        """The stream broke. Every sequence is kept and waits again, before all that came later; what was in flight is
        forgotten. Returns those that broke it again and again, see suspects. Idempotent."""
        executor = self._executors[executor_id]
        if not executor.up:
            return ()
        suspects = present(executor)
        return self._failed(executor, suspects, True, "the executor was lost each time it computed this sequence")

    def plan_failed(self, executor_id: int, error: PlanError, now_ns: int) -> tuple[Ending, ...]:
        """A plan was refused or failed: the epoch is over and the caller reconnects. A request named in two such errors
        ends, and of those that name nobody who stays suspect (see suspects). Errors of an epoch that is over change
        nothing."""
        executor = self._executors[executor_id]
        if not executor.up or error.epoch != executor.epoch:
            return ()
        text = f"the executor refused this sequence again and again: {error.code.name} {error.field} {error.text}"
        if not error.admission_id:
            suspects = [] if error.code == PlanErrorCode.EPOCH_ENDED else present(executor, error.step_id)
            return self._failed(executor, suspects, is_device_fault(error), text)
        sequence = named(executor, error)
        self._close_epoch(executor)
        if sequence is None:
            return ()
        sequence.plan_errors += 1
        if sequence.plan_errors < MAX_PLAN_ERRORS or sequence.state == SequenceState.ENDED:
            return ()
        return tuple(self._fail(sequence, SequenceFailed(text)))

    def _failed(
        self, executor: ExecutorState, suspects: list[Sequence], is_device_fault: bool, text: str
    ) -> tuple[Ending, ...]:
        """The epoch is over, through nobody's known fault."""
        going_on = executor.disconnect()
        guilty = [s for s in suspects if book_death(s, self._tokens_seen, is_device_fault)]
        self._planner.turns.forget(executor.id)
        self._requeue(going_on)
        endings: list[Ending] = []
        for sequence in guilty:
            endings += self._fail(sequence, SequenceFailed(text))
        return tuple(endings)

    def _close_epoch(self, executor: ExecutorState) -> None:
        self._failed(executor, [], False, "")

    # ------------------------------------------------------------------------------------------------------ requests

    def submit(self, request: Submit, now_ns: int) -> None:
        """Accepts a request with all its choices, or nothing of it.

        Raises Draining, Unavailable (no executor was ever connected), DuplicateRequest, InvalidInput, TooLarge,
        NotSupported, DeadlinePassed, Overloaded (with retry_after_ms). A refused request leaves nothing behind.
        """
        sequences = [self._new(choice) for choice in choices(request)]
        try:
            self._check(request, now_ns)
            if (late := self._expiry.overdue(sequences[0], now_ns)) is not None:
                raise late
        except StepwireError:
            self._counters.refused += 1 + len(request.children)
            raise
        self._requests[request.request_id] = request
        for sequence in sequences:
            self._accept(sequence, now_ns)
        leader, *followers = sequences
        self._hash_early(leader)
        self._queue.push(leader)
        self._lead(leader, tuple(followers))

    def _hash_early(self, sequence: Sequence) -> None:
        """Between two steps, for the one that admits the sequence; but not while more wait than the executor runs: kept
        for long, hashes would make a prompt twice as large."""
        for executor in self._executors:
            if executor.up and len(self._queue) < executor.max_num_seqs:
                executor.hash_early(sequence)
                return

    def _new(self, choice: Submit) -> Sequence:
        self._orders += 1
        salt = tenant_salt(choice.cache_salt, choice.tenant) if self.config.isolate_tenants else choice.cache_salt
        return Sequence(choice, self._policy.rank(choice, self._orders), salt)

    def _accept(self, sequence: Sequence, now_ns: int) -> None:
        sequence.tenant = self._tenants.join(sequence.request.tenant)
        self._live[sequence.key] = sequence
        self._expiry.watch(sequence, now_ns)
        self._counters.accepted += 1
        self._counters.prompt_tokens += sequence.prompt_len

    def _lead(self, leader: Sequence, followers: tuple[Sequence, ...]) -> None:
        """`followers` wait for `leader`, and fork from it."""
        leader.leader, leader.followers = None, followers
        for follower in followers:
            follower.leader = leader
            if follower.state != SequenceState.HELD:
                self._queue.hold(follower)

    def _check(self, request: Submit, now_ns: int) -> None:
        infos = [e.info for e in self._executors if e.info is not None]
        if self._draining:
            raise Draining("the server is draining and takes no more requests")
        if not infos:
            raise Unavailable("no executor was ever connected", retry_after_ms=DEFAULT_RETRY_MS)
        if request.request_id in self._requests or not self._live.keys().isdisjoint(request.keys):
            raise DuplicateRequest(f"a request with id {request.request_id!r} is live", field="request_id")
        for info in infos:
            check_request(request, info, self.config)
        check_room(request, self.config, self._queue, self._drain_rate, now_ns)

    def cancel(self, key: int, now_ns: int) -> bool:
        """The caller is gone or gave up. Idempotent; true if the request was live. Nothing more comes for it."""
        sequence = self._live.get(key)
        if sequence is None:
            return False
        self._retire(sequence)
        self._counters.aborted += 1
        return True

    def finish(self, key: int, token_count: int, now_ns: int) -> bool:
        """The worker found a stop string in the first `token_count` generated tokens. As cancel, but a success: the
        tokens after those are not counted."""
        sequence = self._live.get(key)
        if sequence is None:
            return False
        known = sequence.length
        if sequence.row >= 0:
            known = int(self._executors[sequence.executor_id].rows.low[sequence.row])
        self._retire(sequence)
        self._counters.finished += 1
        self._counters.generated_tokens -= max(0, known - sequence.prompt_len - token_count)
        return True

    def keys_of(self, request_id: str) -> tuple[int, ...]:
        """The choices, of the live request with exactly this id, that have not ended. Empty: there is none."""
        request = self._requests.get(request_id)
        return tuple(key for key in request.keys if key in self._live) if request is not None else ()

    def reset_cache(self) -> tuple[int, int]:
        """From now on no admission finds anything that was computed or planned before. Returns how many blocks the
        prefix caches held: idle ones, which are free now, and ones in use, which go on being used."""
        counts = [executor.reset_cache() for executor in self._executors]
        return sum(dropped for dropped, _ in counts), sum(forgotten for _, forgotten in counts)

    def expire(self, now_ns: int) -> tuple[Ending, ...]:
        """Ends what has run out of time: deadlines, and waits longer than max_queue_time_ms. `update` does so itself;
        who owns a clock calls this at `next_expiry_ns`."""
        endings: list[Ending] = []
        for key in self._expiry.due(now_ns):
            sequence = self._live.get(key)
            if sequence is None:
                continue  # ended with its leader, in this very loop
            error = self._expiry.overdue(sequence, now_ns)
            if error is None:
                self._expiry.watch(sequence, now_ns)
                continue
            ended = self._fail(sequence, error)
            self._counters.expired += len(ended)
            endings += ended
        return tuple(endings)

    @property
    def next_expiry_ns(self) -> int:
        """When `expire` may have something to do; 0: not as things stand."""
        return self._expiry.next_ns

    def drain(self) -> None:
        """No more admission from now on."""
        self._draining = True

    def end_all(self, error: StepwireError, now_ns: int) -> tuple[Ending, ...]:
        """Ends every live request with `error`."""
        endings: list[Ending] = []
        while self._live:
            endings += self._fail(next(iter(self._live.values())), error)
        return tuple(endings)

    # --------------------------------------------------------------------------------------------------------- steps

    def can_schedule(self, executor_id: int) -> bool:
        """There is room in the pipeline and something to do. `schedule` may still answer None: then all of it waits for
        results in flight. No side effects."""
        executor = self._executors[executor_id]
        return executor.up and len(executor.flights) < executor.pipeline.now and self._planner.can_plan(executor)

    def schedule(self, executor_id: int, now_ns: int, trace_context: bytes = b"") -> StepRecord | None:
        """The next plan, to be sent at once, in order. None: nothing to do now."""
        executor = self._executors[executor_id]
        if not executor.up or len(executor.flights) >= executor.pipeline.now:
            return None
        return self._planner.plan(executor, now_ns, trace_context)

    def look_ahead(self, executor_id: int) -> None:
        """Once a plan is sent, does what the plan could do without, and early what the next result and the next plan
        will need: gives back the rows and blocks of who ended; evicts; finds the set of rows to decode, the columns of
        the newest step's tokens, the hashes of prompts to admit. Nobody needs to call it; it only takes that work off
        the way from a result to the next plan."""
        executor = self._executors[executor_id]
        if not executor.up:
            return
        executor.free_leaving()
        executor.prepare()
        if len(self._queue) >= executor.max_num_seqs:  # of fewer each was hashed when it came
            for sequence in self._queue.ahead(_ADMITTED_NEXT):
                executor.hash_early(sequence)

    def update(self, executor_id: int, result: StepResult, now_ns: int) -> StepOutcome:
        """Books the result of the oldest step in flight.

        Raises ProtocolError, with nothing changed, when `result` is no answer to it; the caller then breaks the stream.
        """
        executor = self._executors[executor_id]
        collected = collect(executor, result)
        if executor.leaving:  # nobody looked ahead
            executor.free_leaving()
        self._counters.generated_tokens += len(collected.tokens)
        self._tokens_seen += len(collected.tokens)
        self._measure(executor, collected, result.timings, now_ns)
        found = batches(executor, collected, result)
        endings: list[Ending] = []
        for entry, reason in collected.ended.items():
            sequence = executor.rows.seqs[collected.sampled.index.item(entry)]
            assert sequence is not None
            endings.append(self._finish(sequence, reason))
        for row_error in collected.row_errors:
            sequence = executor.rows.seqs[row_error.row]
            assert sequence is not None
            if sequence.state != SequenceState.ENDED:
                error = SequenceFailed(f"{row_error.code.name}: {row_error.text}")
                endings += self._fail(sequence, error)
        if executor.limbo:
            self._requeue(executor.settle())
        if 0 < self._expiry.next_ns <= now_ns:
            endings.extend(self.expire(now_ns))
        return StepOutcome(found, tuple(endings), collected.flight.record)

    # --------------------------------------------------------------------------------------------------------- views

    @property
    def info(self) -> ExecutorInfo | None:
        """Of the first executor that was ever connected, as it was last. None: none was."""
        return next((e.info for e in self._executors if e.info is not None), None)

    @property
    def is_ready(self) -> bool:
        """An executor is connected and the core does not drain."""
        return not self._draining and any(e.up for e in self._executors)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def executors(self) -> tuple[ExecutorState, ...]:
        """For reading."""
        return tuple(self._executors)

    def live_sequences(self) -> tuple[Sequence, ...]:
        """For reading."""
        return tuple(self._live.values())

    @property
    def num_live(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return sum(e.num_parked for e in self._executors) + len(self._queue) + self._queue.num_held

    @property
    def num_running(self) -> int:
        return sum(e.num_running for e in self._executors)

    def by_load(self) -> list[int]:
        """Executors by the share of their sequences that run, least first: the order in which to fill them, so that a
        request that comes alone goes where most room is."""
        return sorted(range(len(self._executors)), key=lambda i: self._executors[i].load)

    def limits(self) -> tuple[int, int]:
        """(max_context, max_prompt_tokens), the KV cache's size taken into account; zeros before any executor."""
        max_context = min((context_limit(e.info) for e in self._executors if e.info is not None), default=0)
        return max_context, max(0, max_context - 1)

    def stats(self) -> Stats:
        """Round-trip times and clock offsets are the caller's to fill in, as are dropped spans."""
        return core_stats(
            self._counters,
            self._executors,
            self._tenants,
            self.num_waiting,
            self.num_running,
            self._queue.num_tokens,
            self._drain_rate.last,
        )

    # ----------------------------------------------------------------------------------------------------- internals

    def _first_admission(self, sequence: Sequence, now_ns: int) -> None:
        self._drain_rate.admitted(now_ns)
        self._tenants.admitted(sequence.tenant, sequence.prompt_len - sequence.cached)

    def _measure(self, executor: ExecutorState, collected: Collected, timings: Timings, now_ns: int) -> None:
        """What the step says about its tenants and about the executor's speed."""
        if len(collected.tokens):
            self._tenants.generated(executor.rows.tenant, collected.sampled.index)
        record = collected.flight.record
        duration_ns = now_ns - max(executor.last_result_ns, record.planned_ns)
        executor.last_result_ns = now_ns
        if record.plan.num_tokens:
            executor.pipeline.update(timings, record.planned_ns, now_ns)
            if executor.itl is not None:
                executor.itl.update(record.prefill_tokens, record.decode_tokens, duration_ns)
            executor.times.update(record.prefill_tokens, duration_ns)

    def _requeue(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._queue.push(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Ending:
        self._retire(sequence)
        self._counters.finished += 1
        return Ending(sequence.key, sequence.request.request_id, reason, None)

    def _fail(self, sequence: Sequence, error: StepwireError) -> list[Ending]:
        """Also ends who still waits for this sequence's prompt: it would compute the same."""
        followers, sequence.followers = sequence.followers, ()
        self._retire(sequence)
        self._counters.failed += 1
        endings = [Ending(sequence.key, sequence.request.request_id, None, error)]
        for follower in followers:
            follower.leader = None
            endings += self._fail(follower, error)
        return endings

    def _retire(self, sequence: Sequence) -> None:
        """The one way out, whatever ended the request: queue, row and ids are given up here."""
        del self._live[sequence.key]
        request_id = sequence.request.request_id
        whole = self._requests.pop(request_id)
        if whole.children and not self._live.keys().isdisjoint(whole.keys):
            self._requests[request_id] = whole
        self._expiry.forget(sequence)
        self._tenants.leave(sequence.tenant)
        if sequence.row >= 0:
            self._executors[sequence.executor_id].vacate(sequence.row, keep=False)
        else:
            self._queue.remove(sequence)
            if (leader := sequence.leader) is not None:
                leader.followers = tuple(f for f in leader.followers if f is not sequence)
        sequence.state = SequenceState.ENDED
        if sequence.followers:  # the next choice leads the rest
            leader, *rest = sequence.followers
            sequence.followers = ()
            self._queue.push(leader)
            self._lead(leader, tuple(rest))
