"""One executor as the core sees it: rows, blocks, steps in flight, epoch. Owner: the scheduler."""

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from common.messages import U32, ExecutorInfo, Welcome, u32
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.itl_controller import ItlController
from scheduler_svc.core.pipeline_depth import PipelineDepth
from scheduler_svc.core.prefill_share import PrefillShare
from scheduler_svc.core.prefix_cache import Kept, extend_hashes
from scheduler_svc.core.row_set import RowSet
from scheduler_svc.core.rows import I64, NEVER, Bools, Rows
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.step_times import StepTimes
from scheduler_svc.messages import FinishReason
from scheduler_svc.observer import StepRecord


@dataclass(slots=True, eq=False)
class Flight:
    """A planned step whose result is not there. decode: the rows that decode; joining: those whose prefill ends with
    it, so that they sample as well. prefills: (row, start, count). Both lists are handed over. has_last_token: for some
    of the sampled rows it is the last token their length allows."""

    step_id: int
    record: StepRecord
    decode: RowSet
    joining: list[int]
    prefills: list[tuple[int, int, int]]
    has_last_token: bool
    _sampled: RowSet | None = None

    @property
    def sampled(self) -> RowSet:
        """The rows that will sample. The plan does without."""
        if self._sampled is None:
            self._sampled = self.decode.joined_by(self.joining)
        return self._sampled


def context_limit(info: ExecutorInfo) -> int:
    """Tokens a sequence may reach on this executor, its whole KV cache taken into account."""
    return min(info.max_context, min(info.max_blocks_per_row, info.num_blocks) * info.block_size)


def wire_limit(info: ExecutorInfo, config: CoreConfig) -> int:
    """Bytes a plan's tokens, tables and sampling parameters may take; the rest of the message is small."""
    return min(config.max_plan_bytes, info.max_message_bytes - info.max_message_bytes // 16)


def output_limit(info: ExecutorInfo, config: CoreConfig) -> int:
    """Bytes of bulk output a step may bring."""
    return min(info.max_output_bytes, config.max_output_bytes or info.max_output_bytes)


class ExecutorState:
    """Lives as long as the address is known; `connect` and `disconnect` bound each epoch.

    limbo: rows that were given up while steps naming them are in flight; they and their blocks are used by nobody
    until the last of those results arrived. leaving: rows of ended sequences that nothing names any more, not free yet
    as that can wait until the next plan is sent; empty when nothing is in flight. releases: rows to name in the next
    plan's `release`. prefilling: rows whose prefill is not planned to its end, in order of admission. quiet_steps: so
    many of the next steps can all rows that decode take without a block and without reaching their end; meaningful
    while the set of `decoding` stands. context: tokens a sequence may reach, here or, should it have to move, on the
    smallest executor known; set by the scheduler.
    """

    def __init__(self, executor_id: int, address: str, config: CoreConfig) -> None:
        self.id = executor_id
        self.address = address
        self._config = config
        self.info: ExecutorInfo | None = None
        self.up = False
        self.epoch = 0
        self.incarnation = 0
        self.steps = 0
        self.epochs_ended = 0
        self.preemptions = 0
        self.times = StepTimes()
        self.itl: ItlController | None = None
        self.share: PrefillShare | None = None
        self.pipeline = PipelineDepth(1, adapts=False)
        self._layout: tuple[int, int] | None = None
        self.pool = BlockPool(0, False)
        self._start(0, 0)
        self.block_size = 1
        self.depth = self.max_num_seqs = self.max_tokens = self.max_output_bytes = self.context = 0
        self.max_wire_bytes = 0
        self.is_eos: Bools = np.zeros(0, dtype=np.bool_)  # [vocab_size]

    def _start(self, num_rows: int, max_blocks: int) -> None:
        self.rows = Rows(num_rows, max_blocks)
        self.free_rows = list(range(num_rows))
        self.flights: deque[Flight] = deque()
        self.limbo: list[int] = []
        self.leaving: list[int] = []
        self.releases: list[int] = []
        self.prefilling: list[int] = []
        self.next_step = 1
        self.last_result = 0
        self.num_running = 0
        self.no_rows = RowSet.of(self.rows, np.empty(0, dtype=np.int64))
        self._decoding: RowSet | None = None
        self.quiet_steps = 0
        self.reserved_output = 0  # bytes of bulk output the next plan keeps for a prefill that waited for them
        self.last_result_ns = 0
        self.trial: Sequence | None = None  # see suspects
        self.blocked: tuple[int, int, int] | None = None  # see the planner's admissions

    # ------------------------------------------------------------------------------------------------------- epochs

    def connect(self, welcome: Welcome) -> None:
        """Starts an epoch. The prefix cache survives when the executor kept the blocks and they are the same."""
        info, config = welcome.info, self._config
        layout = (info.num_blocks, info.block_size)
        kept = welcome.kv_kept and welcome.incarnation == self.incarnation and layout == self._layout
        if not kept:
            self.pool = BlockPool(info.num_blocks, config.enable_prefix_cache)
        self._layout, self.incarnation, self.info = layout, welcome.incarnation, info
        self._start(info.num_rows, info.max_blocks_per_row)
        self.block_size = info.block_size
        self.depth = max(1, min(config.pipeline_depth, welcome.pipeline_depth))
        self.pipeline = PipelineDepth(self.depth, adapts=config.adapt_pipeline_depth)
        self.max_tokens = min(info.max_tokens_per_step, config.max_num_batched_tokens or info.max_tokens_per_step)
        # A running sequence decodes one token per step, so more rows than tokens could never all move.
        self.max_num_seqs = min(info.max_num_seqs, config.max_num_seqs or info.max_num_seqs, self.max_tokens)
        self.max_output_bytes = output_limit(info, config)
        self.max_wire_bytes = wire_limit(info, config)
        self.is_eos = np.zeros(info.vocab_size, dtype=np.bool_)
        self.is_eos[[eos_id for eos_id in info.eos_ids if eos_id < info.vocab_size]] = True
        if config.target_itl_ms:
            self.itl = ItlController(config.target_itl_ms * 1e6, self.max_tokens, self.times)
        is_told = config.prefill_share >= 1 or config.max_num_batched_tokens or config.target_itl_ms
        self.share = PrefillShare(info, config.prefill_share) if info.prefill_token_ns and not is_told else None
        self.up = True

    def disconnect(self) -> list[Sequence]:
        """Ends the epoch: forgets what is in flight and gives up every row. Returns the sequences that go on."""
        if not self.up:
            return []
        self.up = False
        self.epochs_ended += 1
        self.flights.clear()
        going_on = []
        for row, sequence in enumerate(self.rows.seqs):
            if sequence is not None:
                keep = bool(self.rows.accept[row])
                self._free(row, keep)
                if keep:
                    going_on.append(sequence)
        self.rows.recent.keep_promises()
        self._start(0, 0)
        return going_on

    # --------------------------------------------------------------------------------------------------------- rows

    def end_of(self, sequence: Sequence) -> tuple[int, FinishReason]:
        """How long the sequence may grow, and what ends it there."""
        final = sequence.prompt_len + (sequence.request.sampling.max_tokens or self.context)
        return (self.context, FinishReason.CONTEXT) if final > self.context else (final, FinishReason.MAX_TOKENS)

    def take_row(
        self,
        sequence: Sequence,
        admission_id: int,
        shared: list[int],
        fresh: int,
        computed: int,
        final: int,
        end_reason: FinishReason,
    ) -> U32:
        """Gives `sequence` a row whose table is the `shared` blocks (their user count rises) and `fresh` new ones, and
        returns that table. The next plan names the row. `computed`: positions that need no computation; those past
        `shared` are there by a copy. final, end_reason: see `end_of`."""
        rows = self.rows
        row = heapq.heappop(self.free_rows)
        if shared:
            self.pool.share(shared)
        if sequence.cached < 0:
            sequence.cached = computed
        rows.occupy(row, sequence, admission_id, final, end_reason)
        rows.last_step[row] = self.next_step
        rows.protected[row] = sequence.preemptions >= self._config.max_preemptions
        rows.prefilled[row] = computed
        sequence.row, sequence.executor_id, sequence.state = row, self.id, SequenceState.RUNNING
        sequence.admitted_len = sequence.length
        sequence.planned = computed
        sequence.prefilled_step = 0
        sequence.sent = 0
        sequence.registered = sequence.num_known = len(shared)
        blocks = self.pool.allocate(fresh)
        if shared:
            blocks = np.concatenate((np.array(shared, dtype=np.uint32), blocks))
        num_blocks = len(blocks)
        rows.table[row, :num_blocks] = blocks
        rows.table_len[row], rows.capacity[row] = num_blocks, num_blocks * self.block_size
        self.prefilling.append(row)
        self.num_running += 1
        blocks.setflags(write=False)
        return blocks

    def grant(self, grown: I64) -> tuple[U32, U32, U32]:
        """One new block at the end of the table of each row of `grown`; there must be enough. Returns the grants as
        columns: row, table index, block."""
        rows = self.rows
        blocks = self.pool.allocate(len(grown))
        index = rows.table_len[grown]
        rows.table[grown, index] = blocks
        rows.table_len[grown] = index + 1
        capacity = rows.capacity[grown] + self.block_size
        rows.capacity[grown] = capacity
        rows.slack[grown] += self.block_size + NEVER * (capacity >= rows.final[grown] - 1)
        return u32(grown), u32(index), u32(blocks)

    # ----------------------------------------------------------------------------------------------------- decoding

    def decoding(self) -> RowSet:
        """The rows with a token left to plan: the same set as before until one comes or goes. No side effects."""
        if self._decoding is None:
            self._decoding = RowSet.where(self.rows, self.rows.left > 0)
            self.quiet_steps = 0
        return self._decoding

    def look_ahead(self, planned: RowSet) -> bool:
        """After a step of `planned` that was not quiet: finds out how many of the next ones will be. True: some row's
        last token is planned now, and it decodes no more."""
        rows = self.rows
        if planned is not self._decoding:  # some had to sit out
            self._decoding = None
            return not rows.left[planned.index].all()
        if np.count_nonzero(rows.left) < len(planned):
            self._decoding = None
            return True
        least_left = int(np.minimum.reduce(rows.left[planned.index]))
        self.quiet_steps = min(int(np.minimum.reduce(rows.slack)), least_left - 1)
        return False

    def start_decoding(self, row: int, length: int) -> bool:
        """The last chunk of the row's prefill is planned, that of `length` known tokens: it samples, and decodes from
        the next step on. A step writes the slot of the row's last token but one, and blocks are granted depth - 1 steps
        before. True: what it samples is the row's last token."""
        rows = self.rows
        self.prefilling.remove(row)
        high, final, capacity = length + 1, rows.final.item(row), rows.capacity.item(row)
        rows.left[row] = final - high
        slack = capacity - (self.depth - 2) - high + (NEVER if capacity >= final - 1 else 0)
        rows.slack[row], rows.least_slack = slack, min(rows.least_slack, slack)
        rows.decoding[row] = True
        self._decoding = None
        return high == final

    def prepare(self) -> None:
        """Does early what the next result and the next plan need: blocks that are free, which rows sample in the newest
        step in flight, and which decode in the next one."""
        self.pool.evict_early()
        if self.flights:
            newest = self.flights[-1]
            _ = newest.sampled.batch(), newest.sampled.keys
            if self.limbo:  # then who goes on of the step before is likely to be who decodes in this one
                _ = newest.decode.batch()
        _ = self.decoding().keys

    def vacate(self, row: int, keep: bool) -> Sequence | None:
        """Gives a row up. `keep`: tokens still in flight count, and the sequence is returned here or by `settle` once
        the row is free; else (it ended) nothing is returned, and the row is free at the latest when the next result was
        booked."""
        rows = self.rows
        rows.accept[row] = keep
        if not rows.running[row]:
            return None  # in limbo already
        if rows.left[row]:
            rows.left[row], self._decoding = 0, None
        elif not rows.decoding[row]:
            self.prefilling.remove(row)
        rows.running[row] = rows.decoding[row] = False
        rows.slack[row] = NEVER
        self.num_running -= 1
        self.releases.append(row)
        if rows.last_step.item(row) > self.last_result:
            self.limbo.append(row)
            return None
        if keep:
            return self._free(row, keep)
        self._let_go(row)
        return None

    def settle(self) -> list[Sequence]:
        """Ends the limbo of rows whose last result is there. Returns their sequences that go on."""
        going_on: list[Sequence] = []
        still: list[int] = []
        for row in self.limbo:
            if self.rows.last_step[row] > self.last_result:
                still.append(row)
                continue
            if self.rows.accept[row]:
                going_on.append(self._free(row, True))
            else:
                self._let_go(row)
        self.limbo = still
        return going_on

    def _let_go(self, row: int) -> None:
        """Nothing names the row of an ended sequence any more. While steps are in flight there is a next result, before
        which `free_leaving` is called."""
        if self.flights:
            self.leaving.append(row)
        else:
            self._free(row, False)

    def free_leaving(self) -> None:
        for row in self.leaving:
            self._free(row, False)
        self.leaving.clear()

    def _free(self, row: int, keep: bool) -> Sequence:
        """`keep`: the sequence goes on, with all its known tokens."""
        sequence = self.rows.seqs[row]
        assert sequence is not None
        if keep:
            self.rows.flush(row)
        self._free_blocks(row, sequence)
        self.rows.clear(row)
        heapq.heappush(self.free_rows, row)
        sequence.row = -1
        return sequence

    # ------------------------------------------------------------------------------------------------- prefix cache

    def hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """The sequence's hash chain, at least `count` blocks of it."""
        if sequence.hash_block_size != self.block_size:
            sequence.hash_block_size = self.block_size
            sequence.hashes.clear()
        if len(sequence.hashes) < count:
            extend_hashes(sequence.hashes, sequence.view(), self.block_size, sequence.salt, count)
        return sequence.hashes

    def hash_early(self, sequence: Sequence) -> None:
        """Before its admission asks for them: the hashes of all full blocks, if there is a prefix cache."""
        if self.pool.cache is not None:
            self.hashes(sequence, sequence.length // self.block_size)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Of the sequence's known tokens, those the prefix cache holds now and that need not be computed."""
        if self.pool.cache is None:
            return 0
        count = (sequence.length - 1) // self.block_size
        return len(self.pool.match(self.hashes(sequence, count), count)) * self.block_size

    def _free_blocks(self, row: int, sequence: Sequence) -> None:
        """The row's blocks lose a user. What it computed can be found again: behind a registered head as a tail."""
        table, size = self.rows.blocks(row), self.block_size
        first, full = sequence.registered, self.rows.computed(row) // size
        kept = None
        if self.pool.cache is None or self.rows.tainted[row] or full <= first:
            pass
        elif first == 0:
            self.rows.flush(row)
            self.register(row, full * size)
        else:
            # Results of generated tokens came, so that of the prompt did: all of it that others share is registered.
            assert first == sequence.num_known
            tokens = self.rows.known(row, first * size, full * size)
            kept = Kept(table[:full].copy(), first, sequence.hashes[first - 1], tokens, size)
        self.pool.free(table, sequence.num_known, kept)

    def register(self, row: int, computed: int) -> None:
        """Enters the full blocks of the row's first `computed` positions into the prefix cache."""
        sequence, cache = self.rows.seqs[row], self.pool.cache
        assert sequence is not None
        full = computed // self.block_size
        if cache is None or self.rows.tainted[row] or full <= sequence.registered:
            return
        first = sequence.registered
        cache.register(self.hashes(sequence, full)[first:full], self.rows.table[row, first:full].tolist())
        sequence.registered = full
        sequence.num_known = max(sequence.num_known, full)

    def reset_cache(self) -> tuple[int, int]:
        """See BlockPool.reset_cache. What rows hold now, whole or in part, never enters the prefix cache again: not
        when its step's result arrives, nor when the sequence leaves."""
        self.rows.tainted[self.rows.admission > 0] = True
        return self.pool.reset_cache()

    # -------------------------------------------------------------------------------------------------------- views

    @property
    def load(self) -> float:
        """Running sequences, as a share of what one step takes."""
        return self.num_running / max(1, self.max_num_seqs)

    @property
    def num_parked(self) -> int:
        """Preempted sequences whose last results are not there."""
        return int(self.rows.accept[self.limbo].sum()) if self.limbo else 0

    @property
    def num_limbo_blocks(self) -> int:
        """Blocks that become available once the results in flight have arrived: those of leaving rows too."""
        return self.pool.num_freed_by(self.rows.blocks(row) for row in (*self.limbo, *self.leaving))

    @property
    def has_plenty(self) -> bool:
        """Of blocks: so many that nobody's next one is in question."""
        return self.pool.available >= 4 * self.num_running

    @property
    def lacks_rows(self) -> bool:
        """Fewer rows are free than sequences may still be admitted."""
        return len(self.free_rows) < self.max_num_seqs - self.num_running

    @property
    def kept_decoding(self) -> RowSet | None:
        """What `decoding` would answer without looking. None: it would look."""
        return self._decoding

    def first_parked_rank(self) -> int | None:
        """The best rank among preempted sequences that wait for their last results."""
        ranks = [int(self.rows.rank[row]) for row in self.limbo if self.rows.accept[row]]
        return min(ranks, default=None)

    def victim_after(self, rank: int) -> int | None:
        """The running row with the highest rank above `rank` that may be preempted."""
        rows = self.rows
        candidates = np.flatnonzero(rows.running & ~rows.protected & (rows.rank > rank))
        if not len(candidates):
            return None
        return int(candidates[np.argmax(rows.rank[candidates])])
