"""`python -P -m scheduler_svc`: the scheduler process. Flags: see scheduler_svc/config.py or --help."""

import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import common


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 after a drain, EXIT_CONFIG when starting again can not help, else 1."""
    # Stands in both services: a foreign `common` could not be asked for it.
    if Path(common.__file__ or "").resolve().parent != Path(__file__).resolve().parent.parent / "common":
        sys.stderr.write(
            f"stepwire scheduler: the package `common` comes from {common.__file__}, not from this checkout: start it "
            "with `python -P` in an environment of its own\n"
        )
        return 2
    import uvloop

    from common.config import EXIT_CONFIG
    from common.errors import ConfigError, ModelError
    from common.model_files.catalog import resolve
    from common.serving import begin
    from scheduler_svc.api.served_model import ServedModel
    from scheduler_svc.app import Parts, serve
    from scheduler_svc.config import SchedulerConfig
    from scheduler_svc.tokenizer import load_tokenizer
    from scheduler_svc.tracing import TracingOptions, build_tracing

    config = begin(SchedulerConfig, argv).config
    log = logging.getLogger(__name__)
    try:
        files = resolve(config.model)
        tokenizer = load_tokenizer(files)
    except (ConfigError, ModelError) as error:
        log.error("%s", error.message)
        return EXIT_CONFIG
    if tokenizer is None:
        log.warning("%s has no tokenizer: only token ids are served", files.path)
    tracing = build_tracing(
        TracingOptions(
            endpoint=config.otlp_endpoint,
            window_interval_s=config.trace_window_interval_s,
            sample_ratio=config.trace_sample_ratio,
            slow_step_ms=config.slow_step_ms,
        )
    )
    model = ServedModel.of(files.description, config.served_model_name)
    try:
        return uvloop.run(serve(config, Parts(model, tokenizer, tracing, version=_version())))
    finally:
        tracing.shutdown()


def _version() -> str:
    try:
        return version("stepwire")
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
