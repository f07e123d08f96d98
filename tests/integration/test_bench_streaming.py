"""The benchmark measures what it says: every stream's tokens arrive, and each process is counted."""

import pytest

from bench.streaming import Case, run_bare, run_case


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_small_case(workers: int) -> None:
    outcome = run_case(Case(workers, streams=16, rate=400.0, seconds=1.0), clients=2)
    assert outcome.tokens_per_s > 0 and outcome.core_us_per_token > 0
    assert len(outcome.workers_us_per_token) == workers
    assert 0 <= outcome.delay_p50_ms <= outcome.delay_p99_ms


@pytest.mark.slow
def test_a_bare_handler() -> None:
    assert run_bare(Case(0, streams=16, rate=400.0, seconds=1.0), clients=1).service_us_per_token > 0
