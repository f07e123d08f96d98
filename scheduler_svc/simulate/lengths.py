"""Distributions of lengths in tokens, as text: `512`, `uniform:16,1024`, `lognormal:256,0.8[,2048]`."""

from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

I64 = NDArray[np.int64]
_FORMS = "write 512, uniform:LOW,HIGH or lognormal:MEAN,SIGMA[,MAX]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """kind fixed: a is the length. uniform: a to b, both included. lognormal: a is the mean in tokens, b the standard
    deviation of the logarithm, most the largest length (0: no limit). Every length is at least 1."""

    kind: str
    a: float
    b: float = 0.0
    most: int = 0

    def draw(self, count: int, rng: np.random.Generator) -> I64:
        """int64 [count]."""
        if self.kind == "fixed":
            return np.full(count, int(self.a), dtype=np.int64)
        if self.kind == "uniform":
            return rng.integers(int(self.a), int(self.b), size=count, endpoint=True, dtype=np.int64)
        drawn = rng.lognormal(np.log(self.a) - self.b**2 / 2, self.b, size=count)
        return np.clip(np.rint(drawn), 1, self.most or 1 << 40).astype(np.int64)

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.a:g}"
        return f"{self.kind}:{self.a:g},{self.b:g}" + (f",{self.most}" if self.most else "")


def parse_lengths(text: str, field: str) -> Lengths:
    """Raises ConfigError naming `field`."""
    kind, colon, rest = text.partition(":")
    try:
        numbers = [float(part) for part in (rest if colon else kind).split(",")]
    except ValueError:
        numbers = []
    if not all(map(isfinite, numbers)):
        numbers = []
    match (kind if colon else "fixed"), numbers:
        case "fixed", [length] if length >= 1 and length == int(length):
            return Lengths("fixed", length)
        case "uniform", [low, high] if 1 <= low <= high and low == int(low) and high == int(high):
            return Lengths("uniform", low, high)
        case "lognormal", [mean, sigma] if mean >= 1 and 0 <= sigma <= 4:
            return Lengths("lognormal", mean, sigma)
        case "lognormal", [mean, sigma, most] if mean >= 1 and 0 <= sigma <= 4 and most >= 1 and most == int(most):
            return Lengths("lognormal", mean, sigma, int(most))
    raise ConfigError(f"{field} {text!r}: {_FORMS}", field=field)
