"""What the next step computes: running decodes first, then prefill chunks, then who waits."""

from collections.abc import Callable

import numpy as np

from common.messages import MAX_EXTEND_TOKENS, Admit, Extend
from common.prompt_positions import prompt_position_bytes, prompt_positions
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import Draft, admit_bytes, extend_bytes
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.forks import Head, find_head
from scheduler_svc.core.outcome import Counters
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.row_set import RowSet
from scheduler_svc.core.rows import I64, NEVER
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.turns import Turns
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.observer import StepRecord


class Planner:
    """Stateless but for its collaborators and the last admission's id, which no other ever has. `on_first_admission`
    hears of each sequence that leaves the queue for the first time."""

    def __init__(
        self,
        config: CoreConfig,
        policy: Policy,
        queue: WaitingQueue,
        on_first_admission: Callable[[Sequence, int], None],
        counters: Counters,
    ) -> None:
        self._config = config
        self._queue = queue
        self._max_chunk = min(config.max_prefill_chunk or NEVER, config.long_prefill_token_threshold or NEVER)
        self._admission_id = 0
        self._on_first_admission = on_first_admission
        self._counters = counters
        self.turns = Turns(config, policy, queue)

    def can_plan(self, executor: ExecutorState) -> bool:
        """Something may be there to do. `plan` can still find that all of it has to wait for results."""
        return bool(executor.releases or executor.prefilling or len(executor.decoding()) or self._can_admit(executor))

    def plan(self, executor: ExecutorState, now_ns: int, trace_context: bytes) -> StepRecord | None:
        if executor.leaving and (executor.lacks_rows or not executor.has_plenty):
            executor.free_leaving()
        draft = Draft.of(executor)
        self.turns.make_room(executor, self.preempt)
        self._decodes(draft)
        if num_decodes := len(draft.decode.index):
            if executor.itl is not None:
                draft.tokens = min(draft.tokens, executor.itl.budget)
            elif executor.share is not None:
                draft.tokens = min(draft.tokens, executor.share.tokens(num_decodes))
        self._prefills(draft)
        self._admissions(draft, now_ns)
        self._release_followers(draft)
        if draft.is_empty:
            return None
        waiting = len(self._queue) + self._queue.num_held + executor.num_parked
        return draft.finish(now_ns, trace_context, waiting)

    # ------------------------------------------------------------------------------------------------------- decodes

    def _decodes(self, draft: Draft) -> None:
        """Every row that can decodes one token. In a quiet step, in which no row needs a block and none reaches its
        end, that is the set of the step before, and no row is looked at."""
        executor, rows = draft.executor, draft.executor.rows
        ready = executor.decoding()
        if not len(ready.index):
            return
        quiet = executor.quiet_steps > 0
        if not quiet:
            ready = self._with_blocks(draft, ready)
        if rows.num_with_raw:
            ready = self._within_output(draft, ready)
        rows.plan_tokens(ready.advance)
        rows.last_step[ready.index] = draft.step_id
        draft.decode = ready
        draft.tokens -= len(ready.index)
        if quiet:
            executor.quiet_steps -= 1
        else:
            draft.has_last_token = executor.look_ahead(ready)

    def _with_blocks(self, draft: Draft, ready: RowSet) -> RowSet:
        """`ready`, without who has to sit out or was preempted for a block."""
        executor, rows = draft.executor, draft.executor.rows
        if rows.least_slack <= 0:
            rows.least_slack = int(np.minimum.reduce(rows.slack))
        if rows.least_slack <= 0:
            self._grant(draft, (rows.slack <= self._early(executor)).nonzero()[0])
        if draft.blocks_owed:
            return RowSet.where(rows, (rows.left > 0) & (rows.capacity >= rows.final - rows.left))
        return executor.decoding()

    @staticmethod
    def _early(executor: ExecutorState) -> int:
        """So many steps early may a row get its block. While blocks are plenty that is half a block's: as soon as one
        row is in need, those that will be in the next steps are served with it, and nobody is in need for as long.
        What it costs is a quarter of a block for each row; when blocks are short nobody gets one before he needs it."""
        return executor.block_size // 2 if executor.has_plenty else 0

    def _grant(self, draft: Draft, short: I64) -> None:
        """One block for each row that will soon write past its table, best rank first.

        When blocks are out: a row that limbo will satisfy sits out; else whoever ranks last makes room. A row that
        finds nobody to make room sits out too, and keeps what it has: the rows it waits for hold all they will ever
        need, or rank before it.
        """
        executor = draft.executor
        if not executor.pool.can_allocate(len(short)):
            short = self._make_room(draft, short)
        if len(short):
            draft.grants = executor.grant(short)
            executor.rows.last_step[short] = draft.step_id

    def _make_room(self, draft: Draft, short: I64) -> I64:
        """Preempts as needed; returns those of the rows that get their block now."""
        executor, rows, pool = draft.executor, draft.executor.rows, draft.executor.pool
        granted: list[int] = []
        limbo = executor.num_limbo_blocks
        for row in short[np.argsort(rows.rank[short])].tolist():
            if not rows.running[row]:
                continue  # preempted in this very loop
            wanted = len(granted) + draft.blocks_owed + 1
            while wanted > pool.available + limbo:
                victim = executor.victim_after(int(rows.rank[row]))
                if victim is None:
                    break
                self.preempt(executor, victim)
                limbo = executor.num_limbo_blocks
            if wanted <= pool.available:
                granted.append(row)
            else:
                draft.blocks_owed += 1
        return np.array(granted, dtype=np.int64)

    def _within_output(self, draft: Draft, ready: RowSet) -> RowSet:
        """`ready` without the rows whose raw logits have no room in this step; who waited longest goes first,
        of equals who has most left."""
        executor, rows, index = draft.executor, draft.executor.rows, ready.index
        size, raw = self._raw_bytes(executor), index[rows.raw_logits[index]]
        room = max(0, draft.output_bytes - executor.reserved_output) // size
        if room < len(raw):
            raw = raw[np.lexsort((-rows.left[raw], rows.last_step[raw]))[:room]]
            keep = ~rows.raw_logits[index]
            keep[np.isin(index, raw)] = True
            ready = RowSet.of(rows, index[keep])
        draft.output_bytes -= size * len(raw)
        draft.raw.extend((row, rows.high(row)) for row in raw.tolist())
        return ready

    @staticmethod
    def _raw_bytes(executor: ExecutorState) -> int:
        assert executor.info is not None
        return executor.info.vocab_size * 4

    def preempt(self, executor: ExecutorState, row: int) -> None:
        """Takes the row away; the sequence comes back by recompute, after the results of its steps in flight."""
        sequence = executor.rows.seqs[row]
        assert sequence is not None
        sequence.preemptions += 1
        sequence.state = SequenceState.PARKED
        self._counters.preemptions += 1
        executor.preemptions += 1
        if executor.vacate(row, keep=True) is not None:
            self._queue.push(sequence)

    # ------------------------------------------------------------------------------------------------------ prefills

    def _prefills(self, draft: Draft) -> None:
        draft.executor.reserved_output = 0
        for row in tuple(draft.executor.prefilling):
            if draft.tokens <= 0:
                return
            self._chunk(draft, row)

    def _chunk(self, draft: Draft, row: int) -> None:
        """Plans the next chunk of the row's prefill, as large as every budget allows."""
        executor, rows = draft.executor, draft.executor.rows
        sequence = rows.seqs[row]
        assert sequence is not None
        count = min(sequence.admitted_len - sequence.planned, draft.tokens, self._max_chunk)
        if sequence.sent < sequence.planned + count:
            self._send(draft, sequence, sequence.planned + count)
            count = min(count, sequence.sent - sequence.planned)
        if sequence.next_prompt_logprob < sequence.prompt_len:
            count = self._within_prompt_logprobs(draft, sequence, count)
        if count > 0 and rows.raw_logits[row] and sequence.planned + count == sequence.admitted_len:
            size = self._raw_bytes(executor)
            if draft.output_bytes >= size:
                draft.output_bytes -= size
                draft.raw.append((row, sequence.admitted_len))
            else:
                executor.reserved_output = size
                count -= 1
        if count <= 0:
            return
        draft.prefills.append((row, sequence.planned, count))
        draft.tokens -= count
        sequence.planned += count
        rows.last_step[row] = draft.step_id
        if sequence.planned == sequence.admitted_len:
            draft.has_last_token |= executor.start_decoding(row, sequence.admitted_len)
            sequence.prefilled_step = draft.step_id
            draft.sampling_prefills.append(row)
            if sequence.followers:
                draft.leaders.append(sequence)

    def _send(self, draft: Draft, sequence: Sequence, until: int) -> None:
        """Sends known tokens ahead of their use, as far as the plan has room."""
        while sequence.sent < until:
            count = min(MAX_EXTEND_TOKENS, sequence.admitted_len - sequence.sent)
            if extend_bytes(count) > draft.wire_bytes:
                return
            draft.wire_bytes -= extend_bytes(count)
            tokens = sequence.tokens(sequence.sent, sequence.sent + count)
            draft.extends.append(Extend(sequence.row, sequence.sent, tokens))
            sequence.sent += count
            draft.executor.rows.last_step[sequence.row] = draft.step_id

    @staticmethod
    def _within_prompt_logprobs(draft: Draft, sequence: Sequence, count: int) -> int:
        """`count`, less what the bulk output of wanted prompt positions has no room for. Some are wanted."""
        if count <= 0:
            return count
        size = prompt_position_bytes(sequence.request.sampling.num_prompt_logprobs)
        start = sequence.planned
        positions = prompt_positions(sequence.next_prompt_logprob, start, start + count, sequence.prompt_len)
        wanted, room = len(positions), draft.output_bytes // size
        if wanted > room:
            # Position p comes with the computation of p - 1.
            count = positions.start + room - 1 - start
            wanted = room
            if count <= 0:
                draft.executor.reserved_output = max(draft.executor.reserved_output, size)
        draft.output_bytes -= wanted * size
        return count

    # ---------------------------------------------------------------------------------------------------- admissions

    def _can_admit(self, executor: ExecutorState) -> bool:
        has_row = bool(executor.free_rows or executor.leaving)
        return bool(len(self._queue) and executor.num_running < executor.max_num_seqs and has_row)

    def _admissions(self, draft: Draft, now_ns: int) -> None:
        executor = draft.executor
        if draft.blocks_owed:
            return  # the next free blocks belong to rows that sit out
        if not self._can_admit(executor):
            return
        parked = executor.first_parked_rank()
        while draft.tokens > 0 and executor.num_running < executor.max_num_seqs and executor.free_rows:
            sequence = self.turns.next(executor)
            if sequence is None or (parked is not None and self.turns.comes_after(sequence, parked)):
                return
            is_first = sequence.cached < 0
            if not self._try_admit(draft, sequence):
                return
            if is_first:
                self._on_first_admission(sequence, now_ns)
            if sequence.is_suspect:
                executor.trial = sequence
            self._chunk(draft, sequence.row)

    def _try_admit(self, draft: Draft, sequence: Sequence) -> bool:
        executor, pool, size = draft.executor, draft.executor.pool, draft.executor.block_size
        version = pool.cache.version if pool.cache is not None else 0
        if executor.blocked is not None:
            ticket, need, seen = executor.blocked
            if ticket == sequence.ticket and seen == version and need + executor.num_running > pool.available:
                return False
        # Positions that are written: of the last token none is, so a sequence that may take one more step needs one
        # more than it has tokens, and one that may not be preempted all it can get.
        final, end_reason = executor.end_of(sequence)
        last = final - 1
        total = last if sequence.preemptions >= self._config.max_preemptions else min(sequence.length + 1, last)
        num_blocks = -(-max(total, sequence.length) // size)
        bytes_needed = admit_bytes(sequence.length, num_blocks, sequence.request.sampling)
        if bytes_needed > draft.wire_bytes:
            return False
        head = find_head(executor, sequence)
        fresh = num_blocks - len(head.blocks)
        # Each running sequence may want one block soon: admitting into that room would only preempt someone.
        need = fresh + (pool.count_idle(head.blocks) if head.blocks else 0)
        if need + executor.num_running > pool.available:
            executor.blocked = (sequence.ticket, need, version)
            return False
        executor.blocked = None
        draft.wire_bytes -= bytes_needed
        self._queue.remove(sequence)
        self._count(executor, sequence, head)
        self._admission_id += 1
        blocks = executor.take_row(sequence, self._admission_id, head.blocks, fresh, head.computed, final, end_reason)
        if head.leader >= 0:
            self._fork(draft, head, sequence)
        sequence.leader = None
        sequence.sent = min(sequence.length, MAX_EXTEND_TOKENS)
        admit = Admit(
            row=sequence.row,
            admission_id=self._admission_id,
            tokens=sequence.tokens(0, sequence.sent),
            length=sequence.length,
            prompt_len=sequence.prompt_len,
            computed_len=sequence.planned,
            blocks=blocks,
            sampling=sequence.sampling(final - sequence.prompt_len),
        )
        draft.admits.append(admit)
        return True

    @staticmethod
    def _fork(draft: Draft, head: Head, sequence: Sequence) -> None:
        """See core/forks.py. The leader's row is named by this step from now on."""
        rows, row, leader = draft.executor.rows, sequence.row, sequence.leader
        assert leader is not None
        sequence.hashes, sequence.hash_block_size = leader.hashes[: len(head.blocks)], leader.hash_block_size
        rows.last_step[head.leader] = draft.step_id
        leader.num_known = max(leader.num_known, len(head.blocks))
        rows.forked_from[row] = rows.admission[head.leader]
        rows.tainted[row] = rows.tainted[head.leader]  # what the cache must not offer of the one, nor of the other
        if head.copied >= 0:
            draft.copies.append((head.copied, int(rows.table[row, len(head.blocks)])))

    def _release_followers(self, draft: Draft) -> None:
        """Who waited for a prompt that this plan completes may enter from the next plan on, and fork."""
        for leader in draft.leaders:
            for follower in leader.followers:
                self._queue.push(follower)
            leader.followers = ()

    def _count(self, executor: ExecutorState, sequence: Sequence, head: Head) -> None:
        c, has_cache = self._counters, executor.pool.cache is not None
        if sequence.cached >= 0:
            c.readmitted_tokens += sequence.length * has_cache
            c.readmitted_hit_tokens += head.computed
        elif head.leader >= 0:
            c.forked_tokens += head.computed
        else:
            c.cache_queried_tokens += sequence.length * has_cache
            c.cache_hit_tokens += head.computed
