"""Named workloads, and how one is driven whatever answers it: who asks when, what came when, what that amounts to."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from time import perf_counter
from typing import Final

Result = dict[str, object]


@dataclass(frozen=True)
class Workload:
    """`concurrency` requests at once, `requests` in all, `prompt` tokens in, `output` tokens out, each.

    `intruder`: tokens of one more prompt, which arrives once all others decode; what they feel of it is the result.
    """

    concurrency: int
    requests: int
    prompt: int
    output: int
    intruder: int = 0


WORKLOADS: Final = {
    "W1": Workload(concurrency=1, requests=4, prompt=128, output=128),
    "W2": Workload(concurrency=8, requests=32, prompt=128, output=128),
    "W3": Workload(concurrency=32, requests=96, prompt=256, output=64),
    "W4": Workload(concurrency=8, requests=8, prompt=128, output=160, intruder=2000),
}

# Tokens that each of the others has before the intruder comes, and tokens the intruder asks for.
SETTLED: Final = 32
INTRUDER_OUTPUT: Final = 4
WARM_OUTPUT: Final = 8


@dataclass
class Sample:
    """Times of one request, seconds; `arrivals` has one entry per token."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)

    def arrived(self, total: int) -> None:
        """`total` tokens have come by now."""
        self.arrivals += [perf_counter()] * (total - len(self.arrivals))


# Asks for exactly so many tokens behind a prompt of token ids, greedily, and notes in the sample when they come.
Ask = Callable[[Sequence[int], int, Sample], Awaitable[None]]


async def one(ask: Ask, load: Workload, vocab: int, rng: random.Random, sample: Sample | None = None) -> Sample:
    """One request of the workload's size, its prompt fresh. Raises RuntimeError when tokens are missing."""
    prompt = [rng.randrange(1000, vocab) for _ in range(load.prompt)]
    sample = sample or Sample()
    sample.sent = perf_counter()
    await ask(prompt, load.output, sample)
    if len(sample.arrivals) != load.output:
        raise RuntimeError(f"{len(sample.arrivals)} tokens where {load.output} were asked for")
    return sample


async def run(ask: Ask, load: Workload, vocab: int, seed: int) -> Result:
    """Warms up with short requests, as many at once as the load has, then runs it."""
    rng = random.Random(seed)
    short = Workload(1, 1, load.prompt, WARM_OUTPUT)
    await asyncio.gather(*(one(ask, short, vocab, rng) for _ in range(load.concurrency)))
    if load.intruder:
        return _summarise_intrusion(*await _with_intruder(ask, load, vocab, rng))
    left = load.requests
    samples: list[Sample] = []

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            samples.append(await one(ask, load, vocab, rng))

    start = perf_counter()
    await asyncio.gather(*(caller() for _ in range(load.concurrency)))
    return _summarise(samples, perf_counter() - start)


async def _with_intruder(ask: Ask, load: Workload, vocab: int, rng: random.Random) -> tuple[list[Sample], float]:
    """The intruder's sample comes last. Seconds: from its arrival to its last token."""
    samples = [Sample() for _ in range(load.concurrency)]
    others = [asyncio.ensure_future(one(ask, load, vocab, rng, sample)) for sample in samples]
    while any(len(sample.arrivals) < SETTLED for sample in samples):  # noqa: ASYNC110 - samples tell nobody
        await asyncio.sleep(0.005)
    intruder = await one(ask, Workload(1, 1, load.intruder, INTRUDER_OUTPUT), vocab, rng)
    await asyncio.gather(*others)
    return [*samples, intruder], intruder.arrivals[-1] - intruder.sent


def _summarise_intrusion(samples: list[Sample], wall: float) -> Result:
    """Of the others: tokens that came, and gaps that lay, wholly or in part, while the intruder was served."""
    *others, intruder = samples
    begin, end = intruder.sent, intruder.sent + wall
    gaps = [
        b - a for s in others for a, b in zip(s.arrivals, s.arrivals[1:], strict=False) if a < end and b > begin
    ]  # fmt: skip
    count = sum(begin < at <= end for s in others for at in s.arrivals)
    return {
        "output_tokens_per_s": round(count / wall, 1),
        "intruder_ttft_ms": round((intruder.arrivals[0] - intruder.sent) * 1000, 1),
        "ttft": percentiles([s.arrivals[0] - s.sent for s in others]),
        "itl": percentiles(gaps),
    }


def _summarise(samples: list[Sample], wall: float) -> Result:
    gaps = [b - a for s in samples for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)]
    return {
        "output_tokens_per_s": round(sum(len(s.arrivals) for s in samples) / wall, 1),
        "ttft": percentiles([s.arrivals[0] - s.sent for s in samples]),
        "itl": percentiles(gaps),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p95 and p99 in ms of values in seconds."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {f"p{p}_ms": round(cuts[p - 1] * 1000, 2) for p in (50, 95, 99)}
