"""How long a step takes on a modelled executor, and what that executor holds. Kept as JSON files."""

import math
from bisect import bisect_left
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import ConfigError
from common.messages import ExecutorInfo

MODELS: Final = Path(__file__).with_name("models")
_STRICT: Final = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
_SPARE_ROWS: Final = 64  # rows rest in limbo


class Cost(BaseModel):
    """One bound of a step's time, microseconds: linear in its decode rows, its prefill tokens and the tokens of KV
    cache that it reads (each decode row its length, each prefill chunk everything up to its end)."""

    model_config = _STRICT

    base_us: float = Field(default=0.0, ge=0)
    decode_row_us: float = Field(default=0.0, ge=0)
    prefill_token_us: float = Field(default=0.0, ge=0)
    context_token_us: float = Field(default=0.0, ge=0)


class Shape(BaseModel):
    """What the executor would say in its Welcome."""

    model_config = _STRICT

    block_size: int = Field(default=16, ge=1)
    num_blocks: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1, le=65536)
    max_tokens_per_step: int = Field(ge=1)
    max_context: int = Field(ge=2)
    vocab_size: int = Field(ge=64)
    decode_step_ns: int = Field(default=0, ge=0)
    decode_row_ns: int = Field(default=0, ge=0)
    prefill_token_ns: int = Field(default=0, ge=0)


class StepModel(BaseModel):
    """A step takes the largest of `costs`. buckets: numbers of decode rows a graph was captured for; a step of decodes
    alone costs as much as the next of them. origin: "measured" or "derived", and `conditions` say of what."""

    model_config = _STRICT

    name: str
    origin: str = Field(pattern="^(measured|derived)$")
    costs: tuple[Cost, ...] = Field(min_length=1, strict=False)
    executor: Shape
    buckets: tuple[int, ...] = Field(default=(), strict=False)
    conditions: dict[str, str | int | float]
    residual: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "StepModel":
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError("buckets must rise")
        if not any(any(cost.model_dump().values()) for cost in self.costs):
            raise ValueError("costs: every step would take no time at all")
        return self

    def step_ns(self, decode_rows: int, prefill_tokens: int, context_tokens: int) -> int:
        """0 for a step that computes nothing."""
        if not decode_rows and not prefill_tokens:
            return 0
        rows = decode_rows
        if self.buckets and not prefill_tokens:
            at = bisect_left(self.buckets, decode_rows)
            rows = self.buckets[at] if at < len(self.buckets) else decode_rows
        longest = max(
            cost.base_us
            + cost.decode_row_us * rows
            + cost.prefill_token_us * prefill_tokens
            + cost.context_token_us * context_tokens
            for cost in self.costs
        )
        return math.ceil(longest * 1000)

    def info(self) -> ExecutorInfo:
        """Without EOS ids: modelled tokens mean nothing, lengths end by max_tokens."""
        e = self.executor
        return ExecutorInfo(
            model_id=self.name,
            model_hash=self.name,
            vocab_size=e.vocab_size,
            decode_step_ns=e.decode_step_ns,
            decode_row_ns=e.decode_row_ns,
            prefill_token_ns=e.prefill_token_ns,
            eos_ids=(),
            num_rows=e.max_num_seqs + _SPARE_ROWS,
            max_num_seqs=e.max_num_seqs,
            max_blocks_per_row=-(-e.max_context // e.block_size),
            block_size=e.block_size,
            num_blocks=e.num_blocks,
            max_tokens_per_step=e.max_tokens_per_step,
            max_context=e.max_context,
            buckets=self.buckets,
        )


def built_in() -> tuple[str, ...]:
    """Names of the models that ship."""
    return tuple(sorted(path.stem for path in MODELS.glob("*.json")))


def load_model(name: str) -> StepModel:
    """A model that ships, by name, or any file. Raises ConfigError naming file and field."""
    path = Path(name)
    if name in built_in():
        path = MODELS / f"{name}.json"
    elif not path.is_file():
        known = ", ".join(built_in())
        raise ConfigError(f"step model {name!r}: no such file, and none of {known}", field="step_model")
    try:
        return StepModel.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{path}: {where}: {first['msg']}", field=where) from None


def save_model(model: StepModel, path: Path) -> None:
    path.write_text(model.model_dump_json(indent=2) + "\n", encoding="utf-8")
