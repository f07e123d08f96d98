from hypothesis import given
from hypothesis import strategies as st

from common.prompt_positions import prompt_position_bytes, prompt_positions

SMALL = st.integers(0, 12)


@given(first=st.integers(1, 12), start=SMALL, count=SMALL, prompt_len=st.integers(1, 12))
def test_each_position_comes_with_the_one_before_it(first: int, start: int, count: int, prompt_len: int) -> None:
    wanted = [p for p in range(first, prompt_len) if start <= p - 1 < start + count]
    assert list(prompt_positions(first, start, start + count, prompt_len)) == wanted


def test_the_token_alone_takes_its_logprob_and_each_other_an_id_too() -> None:
    assert [prompt_position_bytes(n) for n in (1, 2, 5)] == [4, 12, 36]
