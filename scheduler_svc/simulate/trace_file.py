"""Arrivals from a file: one JSON object per line, strict. docs/simulation/README.md describes the fields."""

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError
from scheduler_svc.simulate.trace import I64, Trace

_S = 1_000_000_000


class Arrival(BaseModel):
    """One line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    arrival_s: float = Field(ge=0, le=1e9)
    prompt_tokens: int = Field(ge=1, le=1 << 24)
    output_tokens: int = Field(ge=1, le=1 << 24)
    prefix_id: str | int = ""
    prefix_tokens: int = Field(default=0, ge=0)
    tenant: str = ""
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    deadline_s: float = Field(default=0.0, ge=0, le=1e6)


class FileWorkload:
    """A Workload."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming file, line and field; OSError."""
        self.path = path
        self._lines = read_arrivals(path)

    def trace(self, rate: float | None = None) -> Trace:
        """A `rate` other than the file's own squeezes or stretches the times between arrivals."""
        lines = self._lines
        arrival = np.array([line.arrival_s for line in lines])
        span = float(arrival[-1] - arrival[0])
        if rate is not None:
            if rate <= 0 or not span:
                why = "all arrive at once" if rate > 0 else f"{rate} is not above 0"
                raise ConfigError(f"{self.path}: rate: {why}", field="rate")
            arrival = (arrival - arrival[0]) * ((len(lines) - 1) / span / rate)
        prefixes = {name: i for i, name in enumerate(dict.fromkeys(x.prefix_id for x in lines if x.prefix_tokens))}
        tenants = {name: i for i, name in enumerate(dict.fromkeys(line.tenant for line in lines))}
        shown = f"{self.path.name}, {(rate or ((len(lines) - 1) / span if span else 0)):g}/s on average"

        def column(values: list[int]) -> I64:
            return np.array(values, dtype=np.int64)

        return Trace(
            arrival_ns=(arrival * _S).astype(np.int64),
            prompt_tokens=column([line.prompt_tokens for line in lines]),
            output_tokens=column([line.output_tokens for line in lines]),
            prefix=column([prefixes[line.prefix_id] if line.prefix_tokens else -1 for line in lines]),
            prefix_tokens=column([line.prefix_tokens for line in lines]),
            tenant=column([tenants[line.tenant] for line in lines]),
            priority=column([line.priority for line in lines]),
            deadline_ns=column([int(line.deadline_s * _S) for line in lines]),
            tenants=tuple(tenants),
            description={"arrivals": shown, "requests": len(lines)},
        )


def read_arrivals(path: Path) -> list[Arrival]:
    """Raises ConfigError naming file, line and field; OSError when the file can not be read."""
    found: list[Arrival] = []
    with path.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = Arrival.model_validate_json(text)
            except ValidationError as error:
                first = error.errors()[0]
                name = ".".join(str(part) for part in first["loc"][:1]) or "the line"
                raise ConfigError(f"{path}:{number}: {name}: {first['msg']}", field=name) from None
            for name, wrong, why in (
                ("arrival_s", bool(found) and line.arrival_s < found[-1].arrival_s, "earlier than the line before"),
                ("prefix_tokens", line.prefix_tokens > line.prompt_tokens, "more than prompt_tokens"),
                ("prefix_id", line.prefix_tokens > 0 and line.prefix_id == "", "missing, where prefix_tokens is given"),
                ("prefix_tokens", not line.prefix_tokens and line.prefix_id != "", "missing, where prefix_id is given"),
            ):
                if wrong:
                    raise ConfigError(f"{path}:{number}: {name}: {why}", field=name)
            found.append(line)
    if not found:
        raise ConfigError(f"{path}: no arrivals in it", field="arrivals")
    return found
