"""Which logprobs of prompt tokens a chunk brings, and their size: said once, as scheduler and executor must agree."""


def prompt_positions(first: int, start: int, end: int, prompt_len: int) -> range:
    """The prompt positions from `first` on that the computation of [start, end) tells of: p with that of p - 1."""
    return range(max(first, start + 1), min(end, prompt_len - 1) + 1)


def prompt_position_bytes(num_prompt_logprobs: int) -> int:
    """Bulk output of one position: the token's own logprob, float32, and id and logprob of all others. Above 0."""
    return 4 + 8 * (num_prompt_logprobs - 1)
