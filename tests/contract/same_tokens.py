"""What it means that tokens stand, whatever the way to them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.messages import OutputKind
from tests.contract.conftest import Makers
from tests.contract.driver import Driver, Options, Request

# Of logits that differ in rounding alone, as a part of their own size; logits of other tokens differ by more than 1.
CLOSE = 0.05


def assert_tokens_stand(make: Makers, ways: Sequence[Options], requests: Sequence[Request]) -> list[list[int]]:
    """Each way gives the tokens that each request gets alone, which are returned.

    Where bits hang on the batch two tokens may be too close to call: there the logits must be those of the request
    alone as far as the tokens are, and the tokens the same when logits are asked for as when they are not.
    """
    one = Options(batch=1)
    if make.has_fixed_bits:
        alone = Driver(make(), one).run(requests)
        for way in ways:
            assert Driver(make(), way).run(requests) == alone, way
        return alone
    want = _told(make, one, requests)
    for way in ways:
        got = _told(make, way, requests)
        assert got[0] == Driver(make(), way).run(requests), way
        _assert_logits_stand(got, want)
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


def _assert_logits_stand(got: Told, want: Told) -> None:
    num_same = 0
    for number, (tokens, alone) in enumerate(zip(got[0], want[0], strict=True)):
        for place, (mine, other) in enumerate(zip(tokens, alone, strict=True)):
            assert distance(got[1][number, place], want[1][number, place]) < CLOSE, (number, place)
            if mine != other:
                break
            num_same += 1
    assert num_same > sum(map(len, want[0])) / 2, "tokens part too soon to show anything"


def distance(values: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.linalg.norm(values - wanted) / np.linalg.norm(wanted))
