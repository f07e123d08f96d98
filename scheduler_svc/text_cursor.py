"""Tokens to text, cut at the first stop string. Pure.

Of several stop strings the one that completes first wins (of those completing at the same character, the longest), so
the result does not depend on how the text was cut into tokens.
"""

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Incremental detokenising of one sequence: only whole UTF-8 comes out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with these tokens; may be empty."""
        ...

    def flush(self) -> str:
        """What is still held back, at the end of the sequence."""
        ...


class StopMatcher:
    """Finds the first completed stop string in text that comes in pieces; holds back only a possible prefix of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._longest = max((len(prefix) for prefix in self._prefixes), default=0)
        self._prefix_ends = frozenset(prefix[-1] for prefix in self._prefixes)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. After a match nothing more comes."""
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return buffer[:start]
        keep = self._length_of_prefix(buffer) if buffer[-1] in self._prefix_ends else 0
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def _length_of_prefix(self, text: str) -> int:
        """Of the longest end of `text` that a stop string may begin with."""
        return next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._prefixes), 0)

    def flush(self) -> str:
        """The held-back tail, which turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class TextCursor:
    """The text of a growing token sequence, cut at the first stop string that ends after `min_tokens` tokens.

    Text of the first `min_tokens` tokens is shown as it comes and is no part of a match.
    """

    __slots__ = ("_decoder", "_matcher", "_min_tokens", "num_tokens")

    def __init__(self, decoder: Decoder, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def matches(self) -> bool:
        """Whether there are stop strings, so that tokens must be pushed as soon as they come."""
        return self._matcher is not None

    @property
    def matched(self) -> str | None:
        return self._matcher.matched if self._matcher else None

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text. With a match, `num_tokens` counts up to the token that completed it and later ones are lost."""
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return self._decoder.push(token_ids)
        parts = []
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            self.num_tokens += 1
            text = self._decoder.push((token_id,))
            parts.append(text if self.num_tokens <= self._min_tokens else self._matcher.push(text))
        return "".join(parts)

    def finish(self) -> str:
        """The rest of the text. It may complete a stop string as well."""
        text = self._decoder.flush()
        if self._matcher is None:
            return text
        return self._matcher.push(text) + self._matcher.flush()
