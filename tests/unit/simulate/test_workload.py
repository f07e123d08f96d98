"""Arrivals and lengths: what is drawn is what was asked for, and the same each time."""

import numpy as np
import pytest

from common.errors import ConfigError
from scheduler_svc.simulate.lengths import Lengths, parse_lengths
from scheduler_svc.simulate.trace import Prompts
from scheduler_svc.simulate.workload import DrawnWorkload
from tests.unit.simulate.scenes import drawn


def test_poisson_arrivals_have_their_rate_and_its_spread() -> None:
    gaps = np.diff(DrawnWorkload(requests=20_000, rate=50.0).trace().arrival_ns) / 1e9
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)


def test_bursts_keep_the_mean_rate_and_are_silent_between() -> None:
    arrival = DrawnWorkload(requests=20_000, rate=50.0, burst=(2.0, 6.0)).trace().arrival_ns / 1e9
    assert (arrival % 8.0 <= 2.0).all()
    assert len(arrival) / arrival[-1] == pytest.approx(50, rel=0.05)
    assert (np.diff(arrival) >= 0).all()


def test_the_same_seed_gives_the_same_requests_at_every_rate() -> None:
    workload = DrawnWorkload(requests=500, prompt=Lengths("uniform", 1, 99), tenants=(("a", 3.0), ("b", 1.0)))
    slow, fast = workload.trace(1.0), workload.trace(4.0)
    assert slow.arrival_ns == pytest.approx(fast.arrival_ns * 4, abs=8)
    for column in ("prompt_tokens", "output_tokens", "tenant"):
        assert (getattr(slow, column) == getattr(fast, column)).all()
    other = DrawnWorkload(requests=500, prompt=Lengths("uniform", 1, 99), seed=2).trace()
    assert (other.prompt_tokens != slow.prompt_tokens).any()


def test_no_setting_changes_what_another_draws() -> None:
    plain, tenants = drawn(), drawn(tenants=(("a", 1.0), ("b", 1.0)), prefixes=3, prefix_tokens=5)
    assert (plain.arrival_ns == tenants.arrival_ns).all()
    assert (plain.prompt_tokens + 5 == tenants.prompt_tokens).all()
    assert set(tenants.prefix.tolist()) == {0, 1, 2}


def test_shares_of_tenants_and_priorities() -> None:
    trace = DrawnWorkload(requests=8000, tenants=(("a", 3.0), ("b", 1.0)), priorities=((0, 9.0), (5, 1.0))).trace()
    assert (trace.tenant == 0).mean() == pytest.approx(0.75, abs=0.03)
    assert set(trace.priority.tolist()) == {0, 5} and (trace.priority == 5).mean() == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("text", ["512", "uniform:16,1024", "lognormal:256,0.8", "lognormal:256,0.8,2048"])
def test_lengths_are_read_and_shown_alike(text: str) -> None:
    lengths = parse_lengths(text, "prompt_tokens")
    assert str(lengths) == text
    drawn = lengths.draw(20_000, np.random.default_rng(1))
    assert drawn.min() >= 1
    wanted = {"5": 512.0, "u": 520.0, "l": 256.0}[text[0]]
    if not text.endswith("2048"):
        assert drawn.mean() == pytest.approx(wanted, rel=0.05)
    else:
        assert drawn.max() <= 2048


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "1.5", "uniform:5", "uniform:9,3", "uniform:0,3", "lognormal:3", "normal:3,1", "fixed:", "3,4"],
)
def test_wrong_lengths_name_the_field(text: str) -> None:
    with pytest.raises(ConfigError, match="prompt_tokens"):
        parse_lengths(text, "prompt_tokens")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("requests", {"requests": 0}),
        ("rate", {"rate": 0.0}),
        ("burst", {"burst": (0.0, 1.0)}),
        ("concurrency", {"concurrency": 2, "burst": (1.0, 1.0)}),
        ("prefixes", {"prefixes": 2}),
        ("deadline_s", {"deadline_s": -1.0}),
    ],
)
def test_wrong_workloads_name_the_field(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=field):
        DrawnWorkload(**changes)  # type: ignore[arg-type]


def test_a_closed_loop_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="a closed loop has none"):
        DrawnWorkload(concurrency=4).trace(3.0)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    trace = drawn(requests=300, prefixes=2, prefix_tokens=40)
    prompts = Prompts(trace, 1000, seed=1)
    made = [prompts.prompt(i) for i in range(len(trace))]
    heads = {int(p): {tuple(made[i][:40].tolist()) for i in np.flatnonzero(trace.prefix == p)} for p in (0, 1)}
    assert all(len(head) == 1 for head in heads.values()) and heads[0] != heads[1]
    tails = [tuple(prompt[40:42].tolist()) for prompt in made if len(prompt) > 41]
    assert len(set(tails)) == len(tails)
    assert [len(prompt) for prompt in made] == trace.prompt_tokens.tolist()
    assert max(int(prompt.max()) for prompt in made) < 1000
