"""Any operations in any order, many of them: no invariant breaks, no token changes, everything ends.

A sample runs always, with every invariant after each eighth operation and the cheap ones after each. The million, with
every invariant after each, takes about twenty minutes of CPU:

    RANDOM_OPERATIONS=1000000 RANDOM_CHECK_EVERY=1 python -m pytest tests/sim/test_random_operations.py

RANDOM_SEED is the seed of the first history; a history is made by its seed alone.
"""

import os
import random

import pytest

from tests.sim.fleet import OPERATIONS, Fleet
from tests.sim.fleet_setting import draw_setting

TOTAL = int(os.environ.get("RANDOM_OPERATIONS", "20000"))
FIRST_SEED = int(os.environ.get("RANDOM_SEED", "0"))
HISTORY = 500  # operations
CHECK_EVERY = int(os.environ.get("RANDOM_CHECK_EVERY", "8"))


def play(seed: int, check_every: int) -> None:
    """One history to its end. Raises AssertionError with the seed and the command that repeats it."""
    rng = random.Random(seed)
    names, weights = list(OPERATIONS), [weight for _, weight in OPERATIONS.values()]
    name = "start"
    try:
        fleet = Fleet(draw_setting(rng), check_every)
        for name in rng.choices(names, weights, k=HISTORY):
            OPERATIONS[name][0](fleet, rng)
        name = "end"
        fleet.end()
    except Exception as error:
        again = f"RANDOM_SEED={seed} RANDOM_OPERATIONS={HISTORY} python -m pytest {__file__}"
        raise AssertionError(f"seed {seed}, at {name}: {error!r}; again: {again}") from error


@pytest.mark.timeout(60 + TOTAL // 100)
def test_random_operations() -> None:
    num_histories = -(-TOTAL // HISTORY)
    for seed in range(FIRST_SEED, FIRST_SEED + num_histories):
        play(seed, 1 if num_histories == 1 else CHECK_EVERY)
