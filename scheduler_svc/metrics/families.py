"""The scheduler's numbers as Prometheus families. Labels are bounded: executors are configured, reasons and errors are
ours; nothing a caller writes becomes a label."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from common.metrics.histogram import Histogram
from scheduler_svc.messages import ExecutorStats, Stats
from scheduler_svc.metrics.observer import ExecutorCounts, MetricsObserver


def families(stats: Stats, seen: MetricsObserver) -> Iterator[Metric]:
    yield from _requests(stats, seen)
    yield from _tokens(stats)
    yield from _executors(stats.executors, seen.executors)
    yield CounterMetricFamily("stepwire_spans_dropped", "traced but lost", value=stats.spans_dropped)


def _requests(stats: Stats, seen: MetricsObserver) -> Iterator[Metric]:
    yield GaugeMetricFamily("stepwire_requests_running", "requests that hold a row", value=stats.running)
    yield GaugeMetricFamily("stepwire_requests_waiting", "requests that wait for a row", value=stats.waiting)
    for name, text, value in (
        ("accepted", "requests taken", stats.requests_accepted),
        ("refused", "requests that never ran", stats.requests_refused),
        ("aborted", "requests given up by callers", stats.requests_aborted),
    ):
        yield CounterMetricFamily(f"stepwire_requests_{name}", text, value=value)
    yield _counter("stepwire_requests_finished", "requests with a finish reason", "reason", seen.finished)
    yield _counter("stepwire_requests_failed", "requests ended by an error, abort included", "error", seen.failed)
    yield _histogram("stepwire_time_to_first_token_seconds", "arrival to first token", [([], seen.first_token)])
    yield _histogram("stepwire_inter_token_seconds", "between a request's tokens", [([], seen.between_tokens)])
    yield _histogram("stepwire_request_seconds", "arrival to finish", [([], seen.duration)])
    yield CounterMetricFamily("stepwire_preemptions", "sequences that lost their row", value=stats.preemptions)


def _tokens(stats: Stats) -> Iterator[Metric]:
    for name, text, value in (
        ("prompt", "prompt tokens accepted", stats.prompt_tokens),
        ("cached", "of those, found computed already", stats.cached_tokens),
        ("generated", "tokens delivered", stats.generated_tokens),
        ("cache_queried", "tokens looked up in the prefix cache", stats.cache_queried_tokens),
        ("cache_hit", "of those, found", stats.cache_hit_tokens),
    ):
        yield CounterMetricFamily(f"stepwire_{name}_tokens", text, value=value)


def _executors(stats: Iterable[ExecutorStats], counts: Mapping[int, ExecutorCounts]) -> Iterator[Metric]:
    connected = GaugeMetricFamily("stepwire_executor_connected", "1: it serves", labels=["executor"])
    epochs = CounterMetricFamily("stepwire_executor_epochs_ended", "connections and epochs lost", labels=["executor"])
    rtt = GaugeMetricFamily("stepwire_executor_rtt_seconds", "round trip of recent pings", labels=["executor"])
    blocks = GaugeMetricFamily(
        "stepwire_kv_blocks", "KV blocks; free holds cached ones too", labels=["executor", "state"]
    )
    tokens = CounterMetricFamily("stepwire_step_tokens", "tokens computed", labels=["executor", "kind"])
    device: list[tuple[list[str], Histogram]] = []
    turn: list[tuple[list[str], Histogram]] = []
    for index, executor in enumerate(stats):
        name = [executor.address]
        connected.add_metric(name, executor.connected)
        epochs.add_metric(name, executor.epochs_ended)
        rtt.add_metric(name, executor.rtt_ns / 1e9)
        used = executor.num_blocks - executor.free_blocks - executor.limbo_blocks
        for state, value in (
            ("used", used), ("free", executor.free_blocks), ("limbo", executor.limbo_blocks),
            ("cached", executor.cached_blocks),
        ):  # fmt: skip
            blocks.add_metric([*name, state], value)
        own = counts.get(index) or ExecutorCounts()
        tokens.add_metric([*name, "decode"], own.decode_tokens)
        tokens.add_metric([*name, "prefill"], own.prefill_tokens)
        device.append((name, own.device))
        turn.append((name, own.turn))
    yield from (connected, epochs, rtt, blocks, tokens)
    yield _histogram("stepwire_step_device_seconds", "the device's work of a step", device, ["executor"])
    yield _histogram("stepwire_step_turn_seconds", "from plan to result", turn, ["executor"])


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(
    name: str, text: str, histograms: Iterable[tuple[list[str], Histogram]], labels: list[str] | None = None
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels or [])
    for values, histogram in histograms:
        family.add_metric(values, histogram.buckets(), histogram.sum_s)
    return family
