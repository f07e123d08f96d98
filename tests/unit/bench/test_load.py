"""How a workload is driven and summed up, against answers that come when the test says."""

import asyncio
from collections.abc import Sequence

import pytest

from bench.load import INTRUDER_OUTPUT, SETTLED, WARM_OUTPUT, Result, Sample, Workload, run


class Answers:
    """Answers a token at each turn of the loop. `most`: how many asked at once. `hold`: tokens after which an answer
    waits until someone asks for INTRUDER_OUTPUT; 0: none does."""

    def __init__(self, missing: int = 0, hold: int = 0) -> None:
        self.asked: list[tuple[int, int]] = []
        self.prompts: list[tuple[int, ...]] = []
        self.now = self.most = 0
        self._missing, self._hold = missing, hold
        self._came = asyncio.Event()

    async def ask(self, prompt: Sequence[int], output: int, sample: Sample) -> None:
        self.asked.append((len(prompt), output))
        self.prompts.append(tuple(prompt))
        self.now += 1
        self.most = max(self.most, self.now)
        if output == INTRUDER_OUTPUT:
            self._came.set()
        for total in range(1, output - self._missing + 1):
            if total == self._hold:
                await self._came.wait()
            await asyncio.sleep(0)
            sample.arrived(total)
        self.now -= 1


def results_of(answers: Answers, load: Workload) -> Result:
    return asyncio.run(run(answers.ask, load, vocab=2000, seed=1))


def test_all_requests_are_asked_so_many_at_once_after_a_short_round() -> None:
    answers = Answers()
    result = results_of(answers, Workload(concurrency=3, requests=7, prompt=5, output=9))
    assert answers.asked == [(5, WARM_OUTPUT)] * 3 + [(5, 9)] * 7
    assert answers.most == 3
    assert len(set(answers.prompts)) == 10
    assert float(str(result["output_tokens_per_s"])) > 0 and "intruder_ttft_ms" not in result


def test_the_intruder_comes_once_all_others_decode() -> None:
    answers = Answers(hold=SETTLED + 1)
    result = results_of(answers, Workload(concurrency=2, requests=2, prompt=5, output=64, intruder=50))
    assert answers.asked[2:] == [(5, 64), (5, 64), (50, INTRUDER_OUTPUT)]
    assert float(str(result["intruder_ttft_ms"])) >= 0


def test_missing_tokens_are_no_result() -> None:
    with pytest.raises(RuntimeError, match="7 tokens where 8"):
        results_of(Answers(missing=1), Workload(1, 1, 5, 9))
