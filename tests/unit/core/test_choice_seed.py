from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.choice_seed import choice_seed

SEEDS = st.integers(0, 2**64 - 1)


def test_outputs_are_those_of_splitmix64() -> None:
    """The first outputs of the generator for seed 1234567, as its public test vectors have them."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [choice_seed(1234567, i) for i in range(1, 6)] == first


@given(SEEDS)
def test_choice_0_has_the_seed_itself_and_all_differ(seed: int) -> None:
    seeds = [choice_seed(seed, i) for i in range(64)]
    assert seeds[0] == seed and len(set(seeds)) == 64
    assert all(0 <= own < 2**64 for own in seeds)
