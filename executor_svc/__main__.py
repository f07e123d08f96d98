"""`python -P -m executor_svc`: the executor process. Flags: see executor_svc/config.py or --help."""

import sys
from pathlib import Path

import common
from executor_svc.process_end import leave


def refuse_foreign_common() -> None:
    """Leaves with SystemExit unless `common` is this checkout's. Stands in both services: a foreign one could not be
    asked for it."""
    if Path(common.__file__ or "").resolve().parent != Path(__file__).resolve().parent.parent / "common":
        sys.stderr.write(
            f"stepwire executor: the package `common` comes from {common.__file__}, not from this checkout: start it "
            "with `python -P` in an environment of its own\n"
        )
        raise SystemExit(2)


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 after a drain, EXIT_CONFIG when starting again can not help, else 1."""
    import uvloop

    from common.model_files.catalog import resolve
    from common.serving import begin
    from executor_svc.app import ServeOptions, serve
    from executor_svc.config import ExecutorConfig
    from executor_svc.environment import prepare_environment
    from executor_svc.load_progress import StartProgress, make_teller
    from executor_svc.session import SessionLimits
    from executor_svc.step_executor import StepExecutor
    from executor_svc.tracing import build_sink

    config = begin(ExecutorConfig, argv).config
    prepare_environment(config.numerics)
    limits = SessionLimits(lease_ns=int(config.lease_s * 1e9))

    progress = StartProgress(make_teller(config.progress))

    def build() -> StepExecutor:
        try:
            files = resolve(config.model, progress, load_format=config.load_format)
            from executor_svc.assemble import build_executor  # torch: not before port and model are known to be good

            executor = build_executor(config, files, limits.max_pipeline_depth, progress)
            progress.finish()
        finally:
            progress.close()
        return executor

    options = ServeOptions(config.listen, config.drain_s, config.address_file, limits, config.metrics_listen)
    sink = build_sink(config.otlp_endpoint)
    try:
        return uvloop.run(serve(options, build, sink, progress.seconds))
    finally:
        progress.close()  # a start that was cut short leaves no bar
        if sink is not None:
            sink.shutdown()


if __name__ == "__main__":
    refuse_foreign_common()
    from common.standard_streams import end_on_interrupt, fill_standard_streams

    fill_standard_streams()
    end_on_interrupt()
    leave(main(sys.argv[1:]))
