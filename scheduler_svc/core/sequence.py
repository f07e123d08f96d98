"""One request as the core knows it: its tokens, its place, and what must survive an executor."""

from dataclasses import replace
from enum import IntEnum

import numpy as np

from common.messages import U32, Sampling, u32
from scheduler_svc.messages import Submit


class SequenceState(IntEnum):
    WAITING = 1  # in the queue
    RUNNING = 2  # has a row
    PARKED = 3  # preempted; the results of its last steps are still under way
    ENDED = 4
    HELD = 5  # a further choice of n > 1 that waits until its leader's prompt is planned to the end


class Sequence:
    """Owner: the scheduler. Known tokens are in `tokens()`, `length` of them; those of a running sequence since its
    last flush lie in its executor's `Rows.recent`.

    rank: see policies. tenant: slot in Tenants. salt: of the prefix cache. cached: prompt tokens found in the prefix
    cache at first admission (-1: never admitted). is_suspect: executors died more than once while they computed it, and
    it got no further since; with deaths, death_length, death_mark: see suspects. next_prompt_logprob: first prompt
    position whose logprobs are still wanted; prompt_len: none are. hashes: chain of the full blocks computed so far,
    for `hash_block_size`. leader: the choice of the same prompt to fork from, until the first admission. followers:
    choices that are HELD until this one's prompt is planned to the end. The fields below `row` belong to the present
    admission.
    """

    __slots__ = (
        "_tokens",
        "admitted_len",
        "cached",
        "death_length",
        "death_mark",
        "deaths",
        "executor_id",
        "followers",
        "hash_block_size",
        "hashes",
        "is_suspect",
        "key",
        "leader",
        "length",
        "next_prompt_logprob",
        "num_known",
        "plan_errors",
        "planned",
        "preemptions",
        "prefilled_step",
        "prompt_len",
        "rank",
        "registered",
        "request",
        "row",
        "salt",
        "sent",
        "state",
        "tenant",
        "ticket",
    )

    def __init__(self, request: Submit, rank: int, salt: bytes = b"") -> None:
        self.request = request
        self.key = request.key
        self.rank = rank
        self.tenant = 0
        self.salt = salt
        self.prompt_len = len(request.prompt)
        self._tokens: U32 = request.prompt
        self.length = self.prompt_len
        self.state = SequenceState.WAITING
        self.ticket = 0
        self.preemptions = 0
        self.plan_errors = 0
        self.cached = -1
        self.is_suspect = False
        self.deaths = 0
        self.death_length = 0
        self.death_mark = 0
        sampling = request.sampling
        wants_logprobs = sampling.num_prompt_logprobs > 0
        self.next_prompt_logprob = max(sampling.prompt_logprobs_from, 1) if wants_logprobs else self.prompt_len
        self.hashes: list[bytes] = []
        self.hash_block_size = 0
        self.leader: Sequence | None = None
        self.followers: tuple[Sequence, ...] = ()
        self.executor_id = -1
        self.row = -1
        self.admitted_len = 0  # tokens known when the row was taken
        self.planned = 0  # positions whose computation is planned; only rises until admitted_len
        self.prefilled_step = 0  # the step that computes its last known token; 0: not planned yet
        self.sent = 0  # tokens the executor was given
        self.registered = 0  # head blocks of the table that are in the prefix cache or were looked at for it
        self.num_known = 0  # head blocks of the table that others may use or find; registered or not

    @property
    def was_admitted(self) -> bool:
        return self.cached >= 0

    def append(self, tokens: U32) -> None:
        end = self.length + len(tokens)
        if end > len(self._tokens) or not self._tokens.flags.writeable:
            grown = np.empty(max(end + 64, self.length * 5 // 4), dtype=np.uint32)
            grown[: self.length] = self._tokens[: self.length]
            self._tokens = grown
        self._tokens[self.length : end] = tokens
        self.length = end
        self.is_suspect = False

    def tokens(self, start: int = 0, end: int | None = None) -> U32:
        """Known tokens, read-only and safe to hand over: the prompt itself, or a copy."""
        if start == 0 and end == self.prompt_len and self._tokens is self.request.prompt:
            return self._tokens
        return u32(self._tokens[start : self.length if end is None else end].copy())

    def view(self) -> U32:
        """Known tokens without a copy: valid until the next append."""
        return self._tokens[: self.length]

    def sampling(self, max_tokens: int) -> Sampling:
        """What an Admit carries: `max_tokens` resolved, prompt logprobs only where they are still wanted."""
        s = self.request.sampling
        if s.max_tokens == max_tokens and not s.num_prompt_logprobs:
            return s
        wanted = self.next_prompt_logprob < self.prompt_len
        return replace(
            s,
            max_tokens=max_tokens,
            num_prompt_logprobs=s.num_prompt_logprobs if wanted else 0,
            prompt_logprobs_from=self.next_prompt_logprob if wanted else 0,
        )
