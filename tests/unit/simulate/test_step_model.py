"""Step models: files are strict, buckets round up, and a fit finds what made the steps."""

import json
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from scheduler_svc.simulate.fit import Header, MeasuredStep, fit_steps, read_steps, write_steps
from scheduler_svc.simulate.step_model import Cost, StepModel, built_in, load_model, save_model
from tests.unit.simulate.scenes import MODEL, SHAPE

HEADER = Header(conditions={"device": "none"}, executor=SHAPE)


def measured(cost: Cost, count: int = 400, noise: float = 0.02, seed: int = 1) -> list[MeasuredStep]:
    rng = np.random.default_rng(seed)
    steps = []
    prefills = rng.integers(0, 512, count) * (rng.random(count) < 0.3)
    contexts = rng.integers(0, 9000, count)
    for decode, prefill, context in zip(rng.integers(0, 32, count), prefills, contexts, strict=True):
        exact = (
            cost.base_us
            + cost.decode_row_us * decode
            + cost.prefill_token_us * prefill
            + cost.context_token_us * context
        )
        steps.append(
            MeasuredStep(
                decode_tokens=int(decode),
                prefill_tokens=int(prefill),
                context_tokens=int(context),
                duration_us=float(exact * (1 + noise * rng.standard_normal())),
            )
        )
    return steps


def test_every_model_that_ships_loads_and_says_what_it_is() -> None:
    assert "h200-l1b" in built_in()
    for name in built_in():
        model = load_model(name)
        assert model.name == name and model.conditions
        assert model.info().num_rows > model.executor.max_num_seqs
        assert (model.origin == "measured") == bool(model.residual)


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    save_model(MODEL, tmp_path / "m.json")
    assert load_model(str(tmp_path / "m.json")) == MODEL


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"costs": []}, "costs"),
        ({"costs": [{"base_us": 0}]}, "costs"),
        ({"costs": [{"base_us": -1}]}, "costs.0.base_us"),
        ({"costs": [{"base_us": 1, "row_us": 2}]}, "costs.0.row_us"),
        ({"buckets": [4, 2]}, "buckets"),
        ({"origin": "guessed"}, "origin"),
        ({"executor": {}}, "executor.num_blocks"),
    ],
)
def test_wrong_files_name_the_field(tmp_path: Path, change: dict[str, object], field: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(MODEL.model_dump() | change))
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    assert str(path) in caught.value.message and field in caught.value.message


def test_an_unknown_model_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="h200-l1b"):
        load_model("h300")


def test_the_largest_cost_counts_and_buckets_round_up() -> None:
    model = StepModel(
        name="m",
        origin="derived",
        costs=(Cost(base_us=100.0), Cost(decode_row_us=10.0, prefill_token_us=10.0)),
        executor=SHAPE,
        buckets=(1, 8, 16),
        conditions={},
    )
    assert model.step_ns(0, 0, 0) == 0
    assert model.step_ns(5, 0, 0) == 100_000
    assert model.step_ns(9, 0, 0) == 160_000  # 16 rows
    assert model.step_ns(17, 0, 0) == 170_000  # above all buckets
    assert model.step_ns(9, 3, 0) == 120_000  # no graph for a step with prefills


def test_a_fit_finds_what_made_the_steps() -> None:
    cost = Cost(base_us=20_000.0, decode_row_us=300.0, prefill_token_us=90.0, context_token_us=0.5)
    fit = fit_steps(HEADER, measured(cost), "m")
    for name, value in cost.model_dump().items():
        assert getattr(fit.model.costs[0], name) == pytest.approx(value, rel=0.1), name
    assert fit.model.residual["p95_error"] < 0.06
    assert fit.model.origin == "measured" and fit.model.conditions == HEADER.conditions


def test_disturbed_steps_are_left_out() -> None:
    cost = Cost(base_us=20_000.0, decode_row_us=300.0, prefill_token_us=90.0)
    steps = measured(cost)
    slow = [s.model_copy(update={"duration_us": s.duration_us * 6}) for s in steps[::20]]
    fit = fit_steps(HEADER, steps + slow, "m")
    assert fit.disturbed >= len(slow)
    assert fit.model.costs[0].base_us == pytest.approx(20_000, rel=0.05)


def test_no_coefficient_is_negative() -> None:
    steps = [
        MeasuredStep(decode_tokens=n, prefill_tokens=0, context_tokens=100 * n, duration_us=1000.0 - n)
        for n in range(1, 30)
    ]
    cost = fit_steps(HEADER, steps, "m").model.costs[0]
    assert min(cost.model_dump().values()) >= 0


def test_measured_steps_survive_their_file_and_wrong_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = measured(Cost(base_us=10.0), count=8)
    write_steps(path, HEADER.model_dump(), [step.model_dump() for step in steps])
    assert read_steps(path) == (HEADER, steps)
    path.write_text(path.read_text() + '{"decode_tokens": 1, "prefill_tokens": 0, "context_tokens": 0}\n')
    with pytest.raises(ConfigError, match=r"steps.jsonl:10: duration_us"):
        read_steps(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="too few"):
        read_steps(path)
