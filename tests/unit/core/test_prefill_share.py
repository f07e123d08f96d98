"""Prompts get their share of a step's time, whatever decodes beside them."""

from dataclasses import replace
from itertools import count

import pytest

from common.errors import ConfigError
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.prefill_share import MIN_TOKENS, TILE_ROWS, PrefillShare
from tests.fakes.toy_executor import toy_info
from tests.sim.harness import Sim

STEP, ROW, TOKEN = 6_000_000, 600_000, 200_000


@pytest.mark.parametrize("share", [0.25, 0.5, 0.6, 0.8])
@pytest.mark.parametrize("num_decodes", [1, 8, 31, 200])
def test_the_share_of_the_time(share: float, num_decodes: int) -> None:
    tokens = PrefillShare(
        toy_info(decode_step_ns=STEP, decode_row_ns=ROW, prefill_token_ns=TOKEN), share
    ).tokens(num_decodes)  # fmt: skip
    exact = share / (1 - share) * (STEP + num_decodes * ROW) / TOKEN
    assert tokens == MIN_TOKENS or (num_decodes + tokens) % TILE_ROWS == 0
    assert abs(tokens - exact) <= TILE_ROWS / 2


def test_prompts_never_stand_still() -> None:
    info = toy_info(decode_step_ns=1000, decode_row_ns=0, prefill_token_ns=TOKEN)
    assert PrefillShare(info, 0.0).tokens(1) >= MIN_TOKENS
    assert PrefillShare(info, 0.6).tokens(300) >= MIN_TOKENS


def _sizes(config: CoreConfig, num_decodes: int, *, measured: bool = True) -> list[tuple[int, int]]:
    """(decodes, prompt tokens) of the steps that compute a prompt of 400 tokens beside so many sequences."""
    costs = {"decode_step_ns": STEP, "decode_row_ns": ROW, "prefill_token_ns": TOKEN} if measured else {}
    limits = {"max_tokens_per_step": 256, "num_blocks": 4000, "max_blocks_per_row": 200}
    sim = Sim(config, toy_info(**costs, **limits))
    numbers = count(5)
    for _ in range(num_decodes):
        sim.submit([next(numbers)], 100, ignore_eos=True)
    if num_decodes:
        sim.fill()
        sim.deliver()
    begin = len(sim.records)
    sim.submit([next(numbers) for _ in range(400)], 2, ignore_eos=True)
    sim.run()
    sim.assert_tokens()
    return [(r.decode_tokens, r.prefill_tokens) for r in sim.records[begin:] if r.prefill_tokens]


def test_beside_decodes_and_alone() -> None:
    assert set(_sizes(CoreConfig(prefill_share=0.6), 8)[:-1]) == {(8, 88)}
    assert set(_sizes(CoreConfig(prefill_share=0.6), 2)[:-1]) == {(2, 62)}
    assert _sizes(CoreConfig(prefill_share=0.6), 0) == [(0, 256), (0, 144)]


@pytest.mark.parametrize(
    ("config", "measured"),
    [
        (CoreConfig(prefill_share=1.0), True),
        (CoreConfig(prefill_share=0.6), False),
        (CoreConfig(prefill_share=0.6, max_num_batched_tokens=256), True),
    ],
)
def test_what_leaves_it_no_say(config: CoreConfig, measured: bool) -> None:
    assert _sizes(config, 8, measured=measured)[0] == (8, 248)


def test_a_target_goes_before_it() -> None:
    config = CoreConfig(prefill_share=0.6, target_itl_ms=1e-3)
    assert _sizes(config, 8) == _sizes(replace(config, prefill_share=1.0), 8)


def test_no_share_above_all() -> None:
    with pytest.raises(ConfigError, match="prefill_share"):
        CoreConfig(prefill_share=1.5)
