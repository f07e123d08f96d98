"""What a process of the scheduler is made of, from its configuration."""

import logging
from importlib.metadata import PackageNotFoundError, version

from common.model_files.catalog import resolve
from scheduler_svc.api.served_model import ServedModel
from scheduler_svc.app import Parts
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.tokenizer import load_tokenizer
from scheduler_svc.tracing import TracingOptions, build_tracing

log = logging.getLogger(__name__)


def assemble(config: SchedulerConfig, *, serves: bool = True) -> Parts:
    """`serves`: the process takes calls, so it needs the tokenizer. The result's tracing wants its `shutdown`.

    Raises ConfigError and ModelError.
    """
    files = resolve(config.model, load_format=config.load_format)
    tokenizer = load_tokenizer(files) if serves else None
    if serves and tokenizer is None:
        log.warning("%s has no tokenizer: only token ids are served", files.path)
    if tokenizer is not None and (problem := tokenizer.chat_template_problem()):
        log.warning("%s: %s; chats that bring no template of their own will be refused", files.path, problem)
    return Parts(
        model=ServedModel.of(files.description, config.served_model_name),
        tokenizer=tokenizer,
        tracing=build_tracing(
            TracingOptions(
                endpoint=config.otlp_endpoint,
                window_interval_s=config.trace_window_interval_s,
                sample_ratio=config.trace_sample_ratio,
                slow_step_ms=config.slow_step_ms,
                share=max(1, config.api_workers),
            )
        ),
        version=_version(),
    )


def _version() -> str:
    try:
        return version("stepwire")
    except PackageNotFoundError:
        return ""
