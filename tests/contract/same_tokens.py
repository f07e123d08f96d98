"""What it means that tokens stand, whatever the way to them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.messages import OutputKind, Sampling, u32
from tests.contract.conftest import Makers
from tests.contract.driver import Driver, Options, Request
from tests.contract.plans import GREEDY, admit, prefill, started

# Of logits that differ in rounding alone, as a part of their own size; logits of other tokens differ by more than 1.
CLOSE = 0.1
# How far apart the logits of two tokens may be that rounding can exchange, as a part of all logits' standard deviation.
# Seen: 0.007; that of two tokens by chance is 1.1 on average, that of the first and the last 5.
NEAR = 0.2


def assert_tokens_stand(make: Makers, ways: Sequence[Options], requests: Sequence[Request]) -> list[list[int]]:
    """Each way gives the tokens that each request gets alone, which are returned.

    Where bits hang on the batch two tokens may be too close to call: there the logits must be those of the request
    alone as far as the tokens are, and the tokens the same when logits are asked for as when they are not. A greedy
    token is the first of its own logits, and where two greedy ones part, nothing but rounding lies between them.
    """
    one = Options(batch=1)
    if make.has_fixed_bits:
        alone = Driver(make(), one).run(requests)
        for way in ways:
            assert Driver(make(), way).run(requests) == alone, way
        return alone
    want = _told(make, one, requests)
    _assert_greedy_is_first(want, requests)
    for way in ways:
        got = _told(make, way, requests)
        assert got[0] == Driver(make(), way).run(requests), way
        _assert_greedy_is_first(got, requests)
        _assert_logits_stand(got, want, requests)
    return want[0]


Told = tuple[list[list[int]], dict[tuple[int, int], NDArray[np.float64]]]


def _told(make: Makers, way: Options, requests: Sequence[Request]) -> Told:
    """Tokens, and the logits of each by (request, place among its generated)."""
    driver = Driver(make(), way)
    tokens = driver.run([replace(request, raw=True) for request in requests])
    logits = {}
    for output in driver.outputs:
        assert output.kind is OutputKind.RAW_LOGITS
        number = driver.numbers[output.admission_id]
        place = output.position - len(requests[number].prompt)
        logits[number, place] = np.frombuffer(output.data, "<f4").astype(np.float64)
    return tokens, logits


def _is_greedy(request: Request) -> bool:
    """Its logits alone decide."""
    return request.sampling == Sampling(
        seed=request.sampling.seed, max_tokens=request.sampling.max_tokens, temperature=0.0, ignore_eos=True
    )


def _assert_greedy_is_first(told: Told, requests: Sequence[Request]) -> None:
    for number, tokens in enumerate(told[0]):
        if _is_greedy(requests[number]):
            assert tokens == [int(told[1][number, place].argmax()) for place in range(len(tokens))], number


def _assert_logits_stand(got: Told, want: Told, requests: Sequence[Request]) -> None:
    num_same = 0
    for number, (tokens, alone) in enumerate(zip(got[0], want[0], strict=True)):
        for place, (mine, other) in enumerate(zip(tokens, alone, strict=True)):
            assert distance(got[1][number, place], want[1][number, place]) < CLOSE, (number, place)
            if mine != other:
                if _is_greedy(requests[number]):
                    logits = want[1][number, place]
                    assert logits[other] - logits[mine] < NEAR * logits.std(), (number, place)
                break
            num_same += 1
    assert num_same > sum(map(len, want[0])) / 2, "tokens part too soon to show anything"


def assert_clear(logits: NDArray[Any]) -> None:
    """No rounding can put another token first."""
    second, first = np.sort(logits)[-2:]
    assert first - second > NEAR * logits.std(), "choose a prompt whose tokens lie further apart"


def clear_tokens(make: Makers, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """Of the prompt in one chunk, then of one token at a time. Where bits hang on the batch `sampling` must be greedy,
    and no token may hang on them: whatever the way to these tokens, they are the same."""
    steps, tokens = started(make()), []
    plan: dict[str, Any] = {"admit": (admit(0, prompt, list(range(8)), sampling=sampling),)}
    plan |= prefill((0, 0, len(prompt)))
    for place in range(count):
        if not make.has_fixed_bits:
            plan |= {"raw_logits_rows": u32([0]), "raw_logits_positions": u32([len(prompt) + place])}
        tokens.append(steps.run(**plan)[0])
        for output in steps.results[-1].outputs:
            assert_clear(np.frombuffer(output.data, "<f4").astype(np.float64))
        plan = {"decode_rows": u32([0])}
    return tokens


def distance(values: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(values - wanted) / np.linalg.norm(wanted))
