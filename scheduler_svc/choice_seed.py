"""The seed of each choice of a request for several."""

from typing import Final

_MASK: Final = (1 << 64) - 1


def choice_seed(seed: int, index: int) -> int:
    """64 bit. Choice 0 has the request's own seed, so that it is what n = 1 gives; choice i > 0 has the i-th output of
    a SplitMix64 generator started at that seed. Fixed for ever: clients may compute it.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of the
    generator's usual form (mix13 of Stafford).
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
