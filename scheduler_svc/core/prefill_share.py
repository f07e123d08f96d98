"""How many prompt tokens a step takes beside sequences that decode: so many that prompts get a fixed share of its time.

Others set a number of tokens (vLLM's max_num_batched_tokens, SGLang's chunked_prefill_size; why it matters: Sarathi-
Serve, Agrawal et al., OSDI 2024). On a GPU any usual one is short against what people notice. On a CPU the number that
is right beside eight sequences starves prompts beside thirty-two, and a larger model has another altogether: a step of
512 prompt tokens holds everybody up for ten steps of theirs. A share is right for all of them.
"""

from common.messages import ExecutorInfo

# Prompts never stand still.
MIN_TOKENS = 16
# Matrix units multiply so many rows at once; a step's tokens are a multiple of it where they can.
TILE_ROWS = 32


class PrefillShare:
    """A step of D decodes and P prompt tokens takes step + D * row + P * token, which the executor measured; P is such
    that the last part is `share` of all. So a sequence decodes at (1 - share) of its speed at least, whatever prompts
    come; a prompt alone takes all there is.
    """

    __slots__ = ("_row", "_step")

    def __init__(self, info: ExecutorInfo, share: float) -> None:
        """share: below 1. Asserts that `info` tells costs."""
        assert info.prefill_token_ns > 0
        # A step's decodes in prompt tokens, times what prompts may take for each.
        tokens = share / (1 - share) / info.prefill_token_ns
        self._step = info.decode_step_ns * tokens
        self._row = info.decode_row_ns * tokens

    def tokens(self, num_decodes: int) -> int:
        """Prompt tokens beside num_decodes > 0."""
        wanted = num_decodes + self._step + num_decodes * self._row
        tiles = int(wanted / TILE_ROWS + 0.5)
        return max(MIN_TOKENS, tiles * TILE_ROWS - num_decodes)
