"""Who arrives when, with what: the requests of one simulation, in columns."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.messages import U32, Sampling, u32
from scheduler_svc.messages import Submit

I64 = NDArray[np.int64]
_SPARE_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """All columns are int64 [requests]; a request's index is its key.

    arrival_ns: rising, from 0; with `concurrency` > 0 (closed loop) unused: so many callers send one request after the
    other. output_tokens: each request generates exactly so many, the context permitting. prefix: index of the shared
    prefix the prompt starts with, or -1; prefix_tokens: how much of the prompt that is. tenant: index into `tenants`.
    deadline_ns: after arrival; 0: none.
    """

    arrival_ns: I64
    prompt_tokens: I64
    output_tokens: I64
    prefix: I64
    prefix_tokens: I64
    tenant: I64
    priority: I64
    deadline_ns: I64
    tenants: tuple[str, ...] = ("",)
    concurrency: int = 0
    description: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_tokens)


class Prompts:
    """Makes the Submit of each request of a trace. Equal prefixes have equal tokens; all else differs from its first
    token on, so that the prefix cache finds exactly what is meant to be shared."""

    def __init__(self, trace: Trace, vocab_size: int, seed: int) -> None:
        self._trace = trace
        self._vocab_size = vocab_size
        self._seed = seed
        longest = int(trace.prompt_tokens.max(initial=1))
        rng = np.random.default_rng((seed, 1))
        self._pool: U32 = rng.integers(vocab_size, size=longest + _SPARE_TOKENS, dtype=np.uint32)
        self._prefixes: dict[int, U32] = {}
        self._prefix_len: dict[int, int] = {}
        for prefix in np.unique(trace.prefix[trace.prefix >= 0]).tolist():
            self._prefix_len[prefix] = int(trace.prefix_tokens[trace.prefix == prefix].max())
        self._samplings: dict[int, Sampling] = {}

    def submit(self, index: int, now_ns: int) -> Submit:
        trace = self._trace
        deadline = int(trace.deadline_ns[index])
        return Submit(
            key=index,
            request_id=str(index),
            prompt=self.prompt(index),
            sampling=self._sampling(int(trace.output_tokens[index])),
            arrival_ns=now_ns,
            priority=int(trace.priority[index]),
            tenant=trace.tenants[int(trace.tenant[index])],
            deadline_ns=now_ns + deadline if deadline else 0,
        )

    def prompt(self, index: int) -> U32:
        trace = self._trace
        count, shared = int(trace.prompt_tokens[index]), int(trace.prefix_tokens[index])
        tokens: U32 = np.empty(count, dtype=np.uint32)
        if shared:
            tokens[:shared] = self._prefix(int(trace.prefix[index]))[:shared]
        if shared < count:
            offset = index % _SPARE_TOKENS
            tokens[shared:] = self._pool[offset : offset + count - shared]
            tokens[shared] = index % self._vocab_size
            if shared + 1 < count:
                tokens[shared + 1] = index // self._vocab_size % self._vocab_size
        return u32(tokens)

    def _prefix(self, prefix: int) -> U32:
        if prefix not in self._prefixes:
            rng = np.random.default_rng((self._seed, 2, prefix))
            size = self._prefix_len[prefix]
            self._prefixes[prefix] = rng.integers(self._vocab_size, size=size, dtype=np.uint32)
        return self._prefixes[prefix]

    def _sampling(self, output_tokens: int) -> Sampling:
        if output_tokens not in self._samplings:
            self._samplings[output_tokens] = Sampling(
                seed=0, max_tokens=output_tokens, temperature=0.0, ignore_eos=True
            )
        return self._samplings[output_tokens]
