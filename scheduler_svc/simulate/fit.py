"""Fits a step model to measured steps, by least squares of the relative error."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError
from scheduler_svc.simulate.step_model import Cost, Shape, StepModel

F64 = NDArray[np.float64]
_ROUNDS: Final = 5
_SPREADS: Final = 5.0  # a step this many median deviations off was disturbed
_COLUMNS: Final = tuple(Cost.model_fields)


class MeasuredStep(BaseModel):
    """One line after the first of a file of measured steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    decode_tokens: int = Field(ge=0)
    prefill_tokens: int = Field(ge=0)
    context_tokens: int = Field(ge=0)
    duration_us: float = Field(gt=0)


class Header(BaseModel):
    """The first line: what was measured, and the executor's shape."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    conditions: dict[str, str | int | float]
    executor: Shape


@dataclass(frozen=True)
class Fit:
    """error: relative, of each step kept, [kept]. disturbed: steps left out as far from all others like them."""

    model: StepModel
    error: F64
    disturbed: int

    def residual(self) -> dict[str, float]:
        p50, p95 = np.percentile(np.abs(self.error), (50, 95))
        return {
            "steps": len(self.error),
            "disturbed": self.disturbed,
            "p50_error": round(float(p50), 4),
            "p95_error": round(float(p95), 4),
            "mean_error": round(float(self.error.mean()), 4),
        }


def read_steps(path: Path) -> tuple[Header, list[MeasuredStep]]:
    """Raises ConfigError naming file, line and field."""
    header: Header | None = None
    steps: list[MeasuredStep] = []
    with path.open("rb") as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                if header is None:
                    header = Header.model_validate_json(text)
                else:
                    steps.append(MeasuredStep.model_validate_json(text))
            except ValidationError as error:
                first = error.errors()[0]
                name = ".".join(str(part) for part in first["loc"]) or "the line"
                raise ConfigError(f"{path}:{number}: {name}: {first['msg']}", field=name) from None
    if header is None or len(steps) < len(_COLUMNS):
        raise ConfigError(f"{path}: {len(steps)} steps are too few to fit", field="fit")
    return header, steps


def fit_steps(header: Header, steps: list[MeasuredStep], name: str) -> Fit:
    """One linear Cost without negative coefficients. Each round leaves out the steps that were disturbed."""
    x: F64 = np.array([(1.0, s.decode_tokens, s.prefill_tokens, s.context_tokens) for s in steps])
    y: F64 = np.array([s.duration_us for s in steps])
    kept = np.ones(len(y), dtype=np.bool_)
    for _ in range(_ROUNDS):
        beta = _solve(x[kept], y[kept])
        error = (x @ beta - y) / y
        centre = np.median(error[kept])
        spread = np.median(np.abs(error[kept] - centre))
        still = np.abs(error - centre) <= max(_SPREADS * float(spread), 1e-9)
        if (still == kept).all() or still.sum() < len(_COLUMNS):
            break
        kept = still
    cost = Cost(**{column: float(f"{value:.6g}") for column, value in zip(_COLUMNS, beta, strict=True)})
    model = StepModel(
        name=name, origin="measured", costs=(cost,), executor=header.executor, conditions=header.conditions
    )
    fit = Fit(model, error[kept], int((~kept).sum()))
    return Fit(model.model_copy(update={"residual": fit.residual()}), fit.error, fit.disturbed)


def _solve(x: F64, y: F64) -> F64:
    """Least squares of the relative error; while a coefficient is negative, the most negative one is set to 0."""
    used = np.ptp(x, axis=0) > 0
    used[0] = True
    scale = np.maximum(np.abs(x).max(axis=0), 1.0)
    weighted = x / scale / y[:, None]
    while True:
        beta: F64 = np.zeros(x.shape[1])
        beta[used] = np.linalg.lstsq(weighted[:, used], np.ones(len(y)), rcond=None)[0]
        if (beta >= 0).all():
            found: F64 = beta / scale
            return found
        used[int(np.argmin(beta))] = False


def write_steps(path: Path, header: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """A file that `read_steps` reads."""
    with path.open("w", encoding="utf-8") as out:
        for line in (header, *steps):
            out.write(json.dumps(line) + "\n")
