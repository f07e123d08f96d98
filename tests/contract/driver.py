"""A small scheduler for tests: makes plans for a set of requests and keeps several of them in flight.

It is no model of the real one: it serves to reach every way in which a sequence can come to its tokens.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.messages import Admit, Extend, Hello, Output, RowError, Sampling, StepPlan, StepResult, u32
from executor_svc.step_executor import PendingStep, StepExecutor

MAX_STEPS = 2_000


class NoEndError(Exception):
    """The requests are not done after MAX_STEPS steps."""


@dataclass(frozen=True)
class Request:
    """`arrives`: the step from which it may be admitted. `raw`: raw logits of every generated position are wanted."""

    prompt: tuple[int, ...]
    sampling: Sampling
    arrives: int = 0
    raw: bool = False


@dataclass
class Progress:
    """What a request has: `tokens` known, `planned` tokens computed or in flight, `sampled` tokens asked for."""

    number: int
    request: Request
    tokens: list[int]
    row: int = -1
    admission_id: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    length: int = 0
    in_flight: int = 0
    sent: int = 0
    error: RowError | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


@dataclass
class Options:
    """depth: plans in flight. chunk: prompt tokens of one sequence in a step. batch: rows in a step.
    preempt_every: a running sequence is thrown out and admitted again every so many steps; 0: never. piece: prompt
    tokens sent with Admit, the rest by Extend as late as possible; 0: all. share: finished prompts' blocks are used by
    later requests with the same beginning. idle: how often a row that could decode sits out. shuffle: blocks and rows
    are handed out in random order.
    """

    depth: int = 1
    chunk: int = 1 << 20
    batch: int = 1 << 20
    preempt_every: int = 0
    piece: int = 0
    share: bool = False
    idle: float = 0.0
    shuffle: bool = True
    seed: int = 0


class Driver:
    """Serves one list of requests on an executor whose epoch it opens."""

    def __init__(self, executor: StepExecutor, options: Options, *, epoch: int = 1) -> None:
        self.executor = executor
        self.options = options
        self.epoch = epoch
        self.results: list[StepResult] = []
        self.outputs: list[Output] = []
        self.numbers: dict[int, int] = {}  # of the requests, by admission id
        self._info = executor.info
        self._rng = random.Random(options.seed)
        self._rows = list(range(self._info.num_rows))
        self._blocks = list(range(self._info.num_blocks))
        if options.shuffle:
            self._rng.shuffle(self._rows)
            self._rng.shuffle(self._blocks)
        self._flight: deque[tuple[PendingStep, list[Progress]]] = deque()
        self._limbo: list[tuple[int, int, list[int]]] = []  # (step, row, blocks)
        self._release: list[int] = []
        self._step = 0
        self._collected = 0
        self._next_admission = epoch << 32
        self._running: list[Progress] = []
        self._cache: list[tuple[tuple[int, ...], int]] = []  # (tokens up to and with a block, block)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Returns each request's generated tokens."""
        return [progress.generated for progress in self.serve(requests)]

    def serve(self, requests: Sequence[Request]) -> list[Progress]:
        hello = Hello(b"d" * 16, self.epoch, self.options.depth, 0, 0)
        self.executor.begin_epoch(hello)
        everyone = [Progress(number, request, list(request.prompt)) for number, request in enumerate(requests)]
        waiting = deque(everyone)
        for _ in range(MAX_STEPS):
            while len(self._flight) >= self.options.depth:
                self._collect()
            if not waiting and not self._running:
                break
            self._plan(waiting)
        else:
            raise NoEndError
        while self._flight:
            self._collect()
        return everyone

    # ------------------------------------------------------------------------------------------------------- plans

    def _plan(self, waiting: deque[Progress]) -> None:
        options, info = self.options, self._info
        self._step += 1
        self._reclaim()
        self._finish_done()
        if options.preempt_every and self._step % options.preempt_every == 0:
            self._preempt(waiting)
        budget, rows = info.max_tokens_per_step, min(options.batch, info.max_num_seqs)
        decode: list[int] = []
        prefill: list[tuple[int, int, int]] = []
        raw: list[tuple[int, int]] = []
        grants: list[tuple[int, int, int]] = []
        extends: list[Extend] = []
        admits: list[Admit] = []
        named: list[Progress] = []
        for state in self._running:
            if options.idle and self._rng.random() < options.idle:
                continue
            if len(named) < rows and budget and self._can_decode(state) and self._grow(state, state.length, grants):
                decode.append(state.row)
                budget -= 1
                self._note(state, 1, raw)
                named.append(state)
        while (
            waiting
            and waiting[0].request.arrives <= self._step
            and waiting[0].in_flight == 0
            and len(self._running) < rows
        ):
            admit = self._admit(waiting[0])
            if admit is None:
                break
            admits.append(admit)
            self._running.append(waiting.popleft())
        for state in self._running:
            if state in named or state.computed >= state.length or len(named) >= rows or not budget:
                continue
            if len(state.tokens) < state.length or self._can_decode(state):
                continue
            count = min(options.chunk, budget, state.length - state.computed)
            end = state.computed + count
            if not self._grow(state, end, grants):
                continue
            if state.sent < min(state.length, end + 1):
                upto = min(state.length, end + 1)
                extends.append(Extend(state.row, state.sent, u32(state.tokens[state.sent : upto])))
                state.sent = upto
            prefill.append((state.row, state.computed, count))
            budget -= count
            self._note(state, count, raw)
            named.append(state)
        prefill.sort()
        raw.sort()
        plan = StepPlan(
            epoch=self.epoch,
            step_id=self._step,
            sent_ns=0,
            num_tokens=len(decode) + sum(count for _, _, count in prefill),
            release=u32(self._release),
            admit=tuple(admits),
            extend=tuple(extends),
            grant_rows=u32(r for r, _, _ in grants),
            grant_indices=u32(i for _, i, _ in grants),
            grant_blocks=u32(b for _, _, b in grants),
            prefill_rows=u32(r for r, _, _ in prefill),
            prefill_starts=u32(s for _, s, _ in prefill),
            prefill_counts=u32(c for _, _, c in prefill),
            decode_rows=u32(sorted(decode)),
            raw_logits_rows=u32(r for r, _ in raw),
            raw_logits_positions=u32(p for _, p in raw),
        )
        self._release = []
        self._flight.append((self.executor.execute(plan, 0), named))

    def _can_decode(self, state: Progress) -> bool:
        has_sampled = state.length > len(state.request.prompt)
        return has_sampled and state.computed == state.length - 1 and not self._is_done(state)

    def _note(self, state: Progress, count: int, raw: list[tuple[int, int]]) -> None:
        """The step computes `count` more tokens of the sequence."""
        state.computed += count
        state.in_flight += 1
        if state.computed == state.length:
            if state.request.raw:
                raw.append((state.row, state.length))
            state.length += 1

    def _grow(self, state: Progress, num_tokens: int, grants: list[tuple[int, int, int]]) -> bool:
        missing = -(-num_tokens // self._info.block_size) - len(state.blocks)
        if missing > len(self._blocks):
            return False
        for _ in range(max(0, missing)):
            block = self._blocks.pop()
            grants.append((state.row, len(state.blocks), block))
            state.blocks.append(block)
        return True

    def _admit(self, state: Progress) -> Admit | None:
        if not self._rows:
            return None
        state.row, state.admission_id = self._rows.pop(), self._next_admission
        self._next_admission += 1
        self.numbers[state.admission_id] = state.number
        state.length, state.blocks = len(state.tokens), self._cached(state.tokens)
        state.computed = len(state.blocks) * self._info.block_size
        first = max(self.options.piece, state.computed + 1) if self.options.piece else state.length
        state.sent = min(state.length, first)
        return Admit(
            state.row,
            state.admission_id,
            u32(state.tokens[: state.sent]),
            state.length,
            len(state.request.prompt),
            state.computed,
            u32(state.blocks),
            state.request.sampling,
        )

    def _cached(self, tokens: list[int]) -> list[int]:
        known = dict(self._cache) if self.options.share else {}
        blocks: list[int] = []
        size = self._info.block_size
        while (len(blocks) + 1) * size < len(tokens):
            block = known.get(tuple(tokens[: (len(blocks) + 1) * size]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    # -------------------------------------------------------------------------------------------------------- ends

    def _is_done(self, state: Progress) -> bool:
        planned = state.length - len(state.request.prompt)
        return state.error is not None or planned >= state.request.sampling.max_tokens

    def _finish_done(self) -> None:
        for state in [s for s in self._running if self._is_done(s) and s.in_flight == 0]:
            if self.options.share and state.error is None:
                self._keep_prefix(state)
            self._leave(state)

    def _leave(self, state: Progress) -> None:
        """The row is released by the plan being made; it and its blocks are free once that plan's result is here."""
        self._running.remove(state)
        self._release.append(state.row)
        self._limbo.append((self._step, state.row, state.blocks))
        state.blocks = []

    def _keep_prefix(self, state: Progress) -> None:
        size = self._info.block_size
        known = dict(self._cache)
        for index in range(len(state.request.prompt) // size):
            tokens = tuple(state.tokens[: (index + 1) * size])
            if tokens not in known:
                self._cache.append((tokens, state.blocks[index]))
        cached = {block for _, block in self._cache}
        state.blocks = [block for block in state.blocks if block not in cached]

    def _preempt(self, waiting: deque[Progress]) -> None:
        candidates = [s for s in self._running if not self._is_done(s) and s.error is None]
        if candidates:
            state = self._rng.choice(candidates)
            if self.options.share:
                cached = {block for _, block in self._cache}
                state.blocks = [block for block in state.blocks if block not in cached]
            self._leave(state)
            # Tokens in flight are kept: it is admitted again only when they are here.
            waiting.appendleft(state)

    def _reclaim(self) -> None:
        free = [entry for entry in self._limbo if entry[0] <= self._collected]
        self._limbo = [entry for entry in self._limbo if entry[0] > self._collected]
        for _, row, blocks in free:
            self._rows.append(row)
            self._blocks.extend(blocks)
        if free and self.options.shuffle:
            self._rng.shuffle(self._rows)
            self._rng.shuffle(self._blocks)

    def _collect(self) -> None:
        pending, named = self._flight.popleft()
        result = pending.wait()
        self._collected = result.step_id
        self.results.append(result)
        self.outputs.extend(result.outputs)
        by_row = dict(zip(result.emitted_rows.tolist(), result.tokens.tolist(), strict=True))
        errors = {error.row: error for error in result.row_errors}
        for state in named:
            state.in_flight -= 1
            if state.row in by_row:
                state.tokens.append(by_row[state.row])
            if state.row in errors:
                state.error = errors[state.row]
