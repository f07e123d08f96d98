"""Setting up tracing in a process: off, or an OTLP exporter, its thread and who we are."""

import logging
import os
import re
import socket
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter

from common.telemetry.endpoint import otlp_endpoint
from common.telemetry.pipeline import SHUTDOWN_TIMEOUT_S, SpanPipeline
from common.telemetry.spans import SpanFactory, package_version

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Tracing of one process, switched on."""

    provider: TracerProvider
    pipeline: SpanPipeline
    spans: SpanFactory

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Flushes, for `timeout_s` at most. Idempotent. Blocks: an event loop calls it last, or in a thread."""
        self.pipeline.shutdown(timeout_s)


def service_resource(service_name: str, instance_id: str) -> Resource:
    """Who exports. OTEL_RESOURCE_ATTRIBUTES adds to it; it does not rename a service, since two share a machine.

    `instance_id` empty: host name and process id.
    """
    return Resource.create(
        {
            "service.name": service_name,
            "service.instance.id": instance_id or f"{socket.gethostname()}:{os.getpid()}",
            "service.version": package_version(),
            "service.namespace": "stepwire",
        }
    )


def start_telemetry(service_name: str, instance_id: str, endpoint: str = "") -> Telemetry | None:
    """Tracing as configured by `endpoint` or the environment; None, and no thread, when it is not."""
    target = otlp_endpoint(endpoint, os.environ)
    if not target:
        return None
    # Loaded here: a process that exports nothing needs no exporter in memory.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    _log.info("spans of %s go to %s", service_name, re.sub(r"(?<=://)[^/@]*@", "***@", target))
    return telemetry(service_name, instance_id, OTLPSpanExporter(endpoint=target))


def telemetry(service_name: str, instance_id: str, exporter: SpanExporter, *, collect_s: float = 0.5) -> Telemetry:
    """Tracing into `exporter`, which the result owns."""
    resource = service_resource(service_name, instance_id)
    pipeline = SpanPipeline(exporter, collect_s=collect_s)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(pipeline)
    return Telemetry(provider, pipeline, SpanFactory(resource))
