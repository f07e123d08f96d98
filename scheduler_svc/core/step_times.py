"""How long steps take, learnt from those that ran."""

_GAIN = 0.1
_CLIP = 4.0


class StepTimes:
    """A step takes base_ns, and token_ns more for each prefill token: two running averages (gain 0.1), each kept from
    being thrown off by one odd step (at most four times what was expected counts). 0: not measured yet.

    base_ns is learnt from steps that only decode. What it misses, because there were none lately or the batch has
    changed, token_ns takes over, so that a step like the last ones is foretold rightly all the same. A step that is
    shorter than base_ns in spite of its prefill shows that base_ns is too long, and tells nothing of token_ns.
    """

    __slots__ = ("base_ns", "token_ns")

    def __init__(self) -> None:
        self.base_ns = 0.0
        self.token_ns = 0.0

    def update(self, prefill_tokens: int, duration_ns: int) -> None:
        expected = self.base_ns + self.token_ns * prefill_tokens
        known = self.token_ns if prefill_tokens else self.base_ns
        duration = min(float(duration_ns), _CLIP * expected) if known else float(duration_ns)
        if prefill_tokens and duration > self.base_ns:
            found = (duration - self.base_ns) / prefill_tokens
            self.token_ns = self.token_ns + _GAIN * (found - self.token_ns) if self.token_ns else found
        else:
            self.base_ns = self.base_ns + _GAIN * (duration - self.base_ns) if self.base_ns else duration

    def needed_ns(self, prompt_tokens: int, output_tokens: int) -> float:
        """For a prompt and the tokens after it, were the executor free for it alone."""
        return self.token_ns * prompt_tokens + self.base_ns * output_tokens
