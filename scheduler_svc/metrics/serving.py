"""The scheduler's numbers over HTTP."""

from common.metrics.endpoint import MetricsServer
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.metrics.observer import MetricsObserver


def serve_scheduler_metrics(listen: str, engine: EngineLoop, seen: MetricsObserver) -> MetricsServer:
    """On the engine's loop. Raises ConfigError when the address can not be had."""
    from scheduler_svc.metrics.families import families

    return MetricsServer(listen, lambda: families(engine.stats(), seen))
