"""How the parts of a split GGUF file are called. Pure. Format: llama.cpp's gguf-split."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.ASCII | re.IGNORECASE)
# What lies beside models in folders and repositories: a vision tower's projector, a quantiser's statistics.
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartName:
    """`STEM-00002-of-00003.gguf`: part `number` (from 1) of `count`. The stem may have folders before it."""

    stem: str
    number: int
    count: int
    ending: str = ".gguf"

    def names(self) -> tuple[str, ...]:
        """Of all parts, in order."""
        return tuple(f"{self.stem}-{n:05d}-of-{self.count:05d}{self.ending}" for n in range(1, self.count + 1))


def parse_part(name: str) -> PartName | None:
    """None: the name of a whole file."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return PartName(match["stem"], int(match["number"]), int(match["count"]), match["ending"])


def is_model(name: str) -> bool:
    """By its name alone: a GGUF file that holds a language model or a part of one."""
    return name.lower().endswith(".gguf") and not _BESIDE.search(name)


def one_a_model(names: Iterable[str]) -> list[str]:
    """Whole files, and of each split one the first part that is there; in the order of `names`."""
    kept: dict[tuple[str, int], str] = {}
    for name in names:
        part = parse_part(name)
        key = (name, 0) if part is None else (part.stem, part.count)
        kept[key] = min(name, kept.get(key, name))
    return list(kept.values())
