"""Traces of real scheduler and executor processes, as a third party's collector received them.

The model is a tiny random Llama, so that a 4,000-token request takes seconds. Where only the processes matter, the
executor is the toy: the same process around a device that needs no torch.
"""

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.telemetry.context import TraceContext, new_trace
from tests.integration.trace_receiver import Seen, receiver
from tests.integration.trace_services import CALL_LIMIT_S, STOP_LIMIT_S, generate, services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCHEDULER = "stepwire-scheduler"
EXECUTOR = "stepwire-executor"
EXECUTOR_PARTS = {"host prepare", "copy in", "device run", "copy out", "answer"}
GENERATE = "/stepwire.v1.Inference/Generate"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Seen], list[TraceContext]]]:
    """Spans of: a 4,000-token request, another beside it with a prompt of many chunks, one of no trace after them."""
    directory = tmp_path_factory.mktemp("trace")
    callers = [new_trace(), new_trace()]
    tokens: dict[int, int] = {}
    with receiver(directory) as collector, services(directory / "services", collector.endpoint) as running:

        def call(index: int, prompt: int, max_tokens: int) -> None:
            tokens[index] = generate(running.address, callers[index], prompt, max_tokens)

        threads = [
            threading.Thread(target=call, args=arguments, daemon=True) for arguments in ((0, 20, 4000), (1, 400, 50))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CALL_LIMIT_S)
        assert tokens == {0: 4000, 1: 50}
        assert generate(running.address, None, 5, 5) == 5
        running.stop()
        yield collector.stop(), callers


Traced = tuple[list[Seen], list[TraceContext]]


def by_trace(spans: list[Seen]) -> dict[str, list[Seen]]:
    traces = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    return traces


def of_caller(spans: list[Seen], caller: TraceContext) -> list[Seen]:
    return [span for span in spans if span.trace_id == f"{caller.trace_id:032x}"]


def window_roots(spans: list[Seen]) -> list[Seen]:
    return [span for span in spans if span.name.startswith("steps ")]


def test_both_services_say_who_they_are(traced: Traced) -> None:
    spans, _ = traced
    assert {span.service for span in spans} == {SCHEDULER, EXECUTOR}
    instances = {(span.service, span.resource["service.instance.id"]) for span in spans}
    assert len({instance for _, instance in instances}) >= 2
    assert all(span.resource["service.version"] for span in spans)


def test_no_trace_is_large(traced: Traced) -> None:
    spans, callers = traced
    sizes = Counter(span.trace_id for span in spans)
    assert max(sizes.values()) <= 500
    for caller in callers:
        assert 4 <= len(of_caller(spans, caller)) <= 40


def test_a_request_is_one_tree_below_its_caller(traced: Traced) -> None:
    spans, callers = traced
    for caller, tokens in zip(callers, (4000, 50), strict=True):
        mine = of_caller(spans, caller)
        (root,) = [s for s in mine if s.name == GENERATE]
        assert root.parent_id == f"{caller.span_id:016x}" and root.kind == "SPAN_KIND_SERVER"
        assert root.attributes["gen_ai.usage.output_tokens"] == str(tokens)
        children = [s for s in mine if s is not root]
        assert {s.parent_id for s in children} == {root.span_id}
        assert {s.service for s in mine} == {SCHEDULER}
        (queue,) = [s for s in children if s.name == "queue"]
        (decode,) = [s for s in children if s.name == "decode"]
        assert decode.attributes["gen_ai.usage.output_tokens"] == str(tokens)
        assert "first token" in decode.events
        assert root.start_ns <= queue.end_ns <= decode.start_ns <= decode.end_ns


def test_prefill_chunks_are_shown_then_merged(traced: Traced) -> None:
    spans, callers = traced
    chunks = [s for s in of_caller(spans, callers[1]) if s.name.startswith("prefill")]
    assert len(chunks) == 17
    assert sum(s.number("stepwire.tokens") for s in chunks) == 400
    assert sorted(s.number("stepwire.position") for s in chunks)[:3] == [0, 16, 32]


def test_windows_hold_steps_of_both_services(traced: Traced) -> None:
    spans, _ = traced
    traces = by_trace(spans)
    roots = window_roots(spans)
    assert roots
    for root in roots:
        steps = [s for s in traces[root.trace_id] if s.parent_id == root.span_id]
        assert 1 <= len(steps) <= 32 and root.parent_id == ""
        assert (
            root.name == f"steps {steps[0].attributes['stepwire.step_id']}–{steps[-1].attributes['stepwire.step_id']}"
        )
        assert len(steps) == root.number("stepwire.num_steps")
        for step in steps:
            parts = [s for s in traces[root.trace_id] if s.parent_id == step.span_id]
            assert len(parts) + 1 <= 10
            computed = {s.name for s in parts if s.service == EXECUTOR}
            if step.attributes["stepwire.mode"] == "none":  # only released rows
                assert computed < EXECUTOR_PARTS
            else:  # a step that repeats the one before has nothing to copy in
                assert computed | {"copy in"} == EXECUTOR_PARTS
                assert "copy in" in computed or not step.number("stepwire.prefill_tokens")
            assert {s.name for s in parts if s.service == SCHEDULER} == {
                "plan", "wire to executor", "wire to scheduler", "update",
            }  # fmt: skip
            for part in parts:
                assert step.start_ns <= part.start_ns <= part.end_ns <= step.end_ns + 1_000_000
            for name in ("decode_tokens", "prefill_tokens", "sequences", "free_blocks", "bucket", "mode"):
                assert f"stepwire.{name}" in step.attributes
            assert "stepwire.device_idle_ms" in step.attributes


def test_consecutive_steps_overlap(traced: Traced) -> None:
    """Plan N+1 is on its way before result N is there."""
    spans, _ = traced
    steps = [s for s in spans if s.name.startswith("step ")]
    windows = defaultdict(list)
    for step in steps:
        windows[step.parent_id].append(step)
    pairs = [pair for group in windows.values() for pair in itertools.pairwise(sorted(group, key=lambda s: s.start_ns))]
    overlapping = [pair for pair in pairs if pair[1].start_ns < pair[0].end_ns]
    assert len(overlapping) > len(pairs) / 2


def test_windows_and_requests_link_to_each_other(traced: Traced) -> None:
    spans, callers = traced
    roots = {(root.trace_id, root.span_id): root for root in window_roots(spans)}
    slow = {(s.trace_id, s.span_id) for s in spans if s.name.startswith("slow step")}
    for caller in callers:
        mine = of_caller(spans, caller)
        (generate_span,) = [s for s in mine if s.name == GENERATE]
        (decode,) = [s for s in mine if s.name == "decode"]
        assert decode.links or caller is callers[1]
        for target in decode.links:
            assert target in roots or target in slow
            if target in roots:
                assert (generate_span.trace_id, generate_span.span_id) in roots[target].links
    assert all(len(root.links) <= 64 for root in roots.values())
    reasons = Counter(root.attributes["stepwire.window.reason"] for root in roots.values())
    assert reasons["request"] >= 1


def test_a_request_of_no_trace_starts_its_own(traced: Traced) -> None:
    spans, callers = traced
    known = {f"{caller.trace_id:032x}" for caller in callers}
    (root,) = [s for s in spans if s.name == GENERATE and s.trace_id not in known]
    assert root.parent_id == ""


def test_a_killed_executor_shows_in_the_request_it_interrupted(tmp_path: Path) -> None:
    caller = new_trace()
    with receiver(tmp_path) as collector, services(tmp_path / "services", collector.endpoint, toy=True) as running:

        def kill_once(number: int) -> None:
            if number == 20:
                running.kill_executor_and_start_another()

        assert generate(running.address, caller, 20, 3000, kill_once) == 3000
        running.stop()
        spans = collector.stop()
    mine = of_caller(spans, caller)
    (decode,) = [s for s in mine if s.name == "decode"]
    order = [e for e in decode.events if e in ("first token", "executor lost", "executor connected", "readmitted")]
    assert order.index("first token") < order.index("executor lost") < order.index("readmitted")
    assert decode.attributes["stepwire.recomputes"] == "1"
    assert any(s.attributes["stepwire.recompute"] == "true" for s in mine if s.name.startswith("prefill"))
    assert len(mine) <= 40
    assert max(Counter(s.trace_id for s in spans).values()) <= 500


def test_with_api_workers_a_request_is_one_trace_of_two_processes(tmp_path: Path) -> None:
    """Its call in the worker, its queue and steps in the core."""
    caller = new_trace()
    with (
        receiver(tmp_path) as collector,
        services(tmp_path / "services", collector.endpoint, toy=True, flags=("--api-workers", "2")) as running,
    ):
        assert generate(running.address, caller, 20, 50) == 50
        running.stop()
        spans = collector.stop()
    mine = of_caller(spans, caller)
    (root,) = [s for s in mine if s.name == GENERATE]
    children = [s for s in mine if s is not root]
    assert root.parent_id == f"{caller.span_id:016x}" and {s.parent_id for s in children} == {root.span_id}
    assert {"queue", "decode"} <= {s.name for s in children}
    assert root.attributes["gen_ai.usage.output_tokens"] == "50"
    core = {s.resource["service.instance.id"] for s in children}
    assert len(core) == 1 and root.resource["service.instance.id"] not in core
    assert {s.resource["service.instance.id"] for s in window_roots(spans)} == core


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:1"], ids=["none", "dead"])
def test_without_a_collector_all_works_and_stopping_takes_no_longer(tmp_path: Path, endpoint: str) -> None:
    """A dead collector costs each process 2 s at most (tests/unit/telemetry holds it to that); nothing may hang."""
    with services(tmp_path, endpoint, toy=True) as running:
        assert generate(running.address, new_trace(), 5, 20) == 20
        running.stop(STOP_LIMIT_S + 2.0 if endpoint else STOP_LIMIT_S)
        if not endpoint:
            assert "spans" not in running.log("scheduler") + running.log("executor")
