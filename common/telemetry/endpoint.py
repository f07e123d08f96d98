"""Whether and where spans are exported. Loads no OpenTelemetry: a process that exports nothing needs none."""

import logging
from collections.abc import Mapping
from typing import Final

SCHEDULER_SERVICE: Final = "stepwire-scheduler"
EXECUTOR_SERVICE: Final = "stepwire-executor"

_log = logging.getLogger(__name__)


def otlp_endpoint(configured: str, environ: Mapping[str, str]) -> str:
    """Where to export to; empty: nowhere. `configured` wins over the standard variables.

    An address without a scheme means plain text, as everywhere in Stepwire.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none" and not configured:
        return ""
    endpoint = (
        configured
        or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
        or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    )
    if not endpoint:
        return ""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol != "grpc":
        _log.warning("OTEL_EXPORTER_OTLP_PROTOCOL is %s, but spans are exported over grpc only", protocol)
    return endpoint if "://" in endpoint else f"http://{endpoint}"
