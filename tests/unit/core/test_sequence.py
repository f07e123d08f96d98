import numpy as np
import pytest

from common.messages import Sampling, u32
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.messages import Submit


def _sequence(**sampling: int) -> Sequence:
    prompt = u32(range(10, 20))
    return Sequence(Submit(1, "a", prompt, Sampling(7, 50, **sampling), 0), 1)  # type: ignore[arg-type]


def test_the_caller_s_prompt_is_never_written() -> None:
    sequence = _sequence()
    prompt = sequence.request.prompt
    for i in range(300):
        sequence.append(u32([i]))
    assert prompt.tolist() == list(range(10, 20))
    assert sequence.view().tolist() == [*range(10, 20), *range(300)]


def test_tokens_handed_over_do_not_change_later() -> None:
    sequence = _sequence()
    sequence.append(u32([1]))
    handed = sequence.tokens(8)
    sequence.append(u32(range(200)))
    assert handed.tolist() == [18, 19, 1]
    with pytest.raises(ValueError, match="read-only"):
        handed[0] = 5
    assert handed.dtype == np.uint32


def test_prompt_logprobs_are_asked_for_only_where_they_are_missing() -> None:
    sequence = _sequence(num_prompt_logprobs=3, prompt_logprobs_from=2)
    assert sequence.sampling(5) == Sampling(7, 5, num_prompt_logprobs=3, prompt_logprobs_from=2)
    sequence.next_prompt_logprob = 6
    assert sequence.sampling(5).prompt_logprobs_from == 6
    sequence.next_prompt_logprob = 10
    assert sequence.sampling(5) == Sampling(7, 5)
