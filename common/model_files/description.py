"""What both services know about a model: the description, and where its files lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from common.model_files.gguf_model import GgufModel
from common.model_files.safetensors_header import SafetensorsHeader


class Progress(Protocol):
    """Called from the thread that asked, a few times a second at most."""

    def __call__(self, activity: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `activity` ("downloading …"); total 0: unknown."""
        ...


def no_progress(activity: str, done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling values the model's own files name; None: not named."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Equal in both services when they were given the same files.

    `hash`: 32 hexadecimal digits over the configuration, every weight file's size and header (tensor names, types,
    shapes, offsets); not over the weights' values, so it costs milliseconds. `eos_ids` is ascending and holds every
    token that ends a turn or a text. `max_positions`: tokens a sequence may reach.
    """

    id: str
    hash: str
    architecture: str
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    default_sampling: SamplingDefaults


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """A model on this machine's disk, headers read and checked, weights not touched.

    `path` is the directory or the GGUF file (of a split one the first part); `config` has Hugging Face's config.json
    form in both cases. At most one of `gguf` and `shards` is filled; neither where the kind is "dummy": there are no
    weights, who loads it makes them up.
    """

    path: Path
    kind: Literal["safetensors", "gguf", "dummy"]
    description: ModelDescription
    config: Mapping[str, Any]
    gguf: GgufModel | None = None
    shards: tuple[SafetensorsHeader, ...] = ()

    @property
    def config_source(self) -> str:
        """The file to name in complaints about `config`."""
        return str(self.path if self.kind == "gguf" else self.path / "config.json")

    @property
    def num_bytes(self) -> int:
        """Bytes of weight files."""
        return self.gguf.size if self.gguf is not None else sum(shard.size for shard in self.shards)
