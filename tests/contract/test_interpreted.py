"""The kernels of backend "triton" in whole runs, small enough for Triton's interpreter."""

from dataclasses import replace

import pytest

from tests.contract.conftest import CAN_INTERPRET
from tests.contract.driver import Driver, Options
from tests.contract.executors import Maker
from tests.contract.test_tokens_stand import GREEDY, requests

FEW = [replace(request, sampling=replace(request.sampling, max_tokens=3)) for request in requests(GREEDY, count=3)]


@pytest.mark.skipif(not CAN_INTERPRET, reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", ["triton", "triton exact"])
def test_tokens_are_those_of_the_other_backends(kind: str) -> None:
    """In another batch, in chunks, preempted, on blocks with a past; both numerics have the one answer here."""
    plain = Maker("exact")()
    want = Driver(plain, Options(batch=1)).run(FEW)
    plain.close()
    executor = Maker(kind)()
    assert Driver(executor, Options(depth=2, chunk=5, preempt_every=4, share=True, seed=5)).run(FEW) == want
    executor.close()
