"""The `stepwire` command. Starts fast: what a command needs is loaded when it runs.

Every failure is one line on standard error and a status that is not 0: 2 for configuration, model files and usage, 130
after Ctrl-C, 1 for the rest.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

from common.standard_streams import fill_standard_streams, leave_standard_stream
from deploy.cli_options import Connection, Generating, grouped

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models = typer.Typer(help="Model files on this machine.", rich_markup_mode=None)
app.add_typer(models, name="models")
kernels = typer.Typer(help="The executor's CPU kernels on this machine.", rich_markup_mode=None)
app.add_typer(kernels, name="kernels")

Json = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("stepwire"))
        raise typer.Exit


@app.callback()
def stepwire(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """LLM serving as two gRPC services, every step visible."""


# --------------------------------------------------------------------------------------------------------- services


@app.command(context_settings=PASS_ON)
def up(
    context: typer.Context,
    first_prompt: Annotated[str, typer.Option(help="sent once both serve")] = "Why is the sky blue?",
    no_first_prompt: Annotated[bool, typer.Option("--no-first-prompt", help="send none")] = False,
    once: Annotated[bool, typer.Option("--once", help="leave with status 0 after the first answer")] = False,
    ready_timeout: Annotated[float, typer.Option(help="seconds until both must serve")] = 600.0,
) -> None:
    """Run an executor and a scheduler on this machine until Ctrl-C.

    Takes the flags of both services too (see `stepwire scheduler --help`, `stepwire executor --help`); --executor-NAME
    and --scheduler-NAME address one of them.
    """
    from deploy.up import UpOptions, run_up

    prompt = "" if no_first_prompt else first_prompt
    raise typer.Exit(run_up(context.args, UpOptions(first_prompt=prompt, once=once, ready_s=ready_timeout)))


@app.command(context_settings=PASS_ON, add_help_option=False)
def scheduler(context: typer.Context) -> None:
    """Run the scheduler alone; --help lists its flags."""
    _become("scheduler_svc", context.args)


@app.command(context_settings=PASS_ON, add_help_option=False)
def executor(context: typer.Context) -> None:
    """Run the executor alone; --help lists its flags."""
    _become("executor_svc", context.args)


@app.command(context_settings=PASS_ON, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Run the real scheduler core against modelled executors; --help lists the flags."""
    from deploy.simulate_command import run as run_simulate

    raise typer.Exit(run_simulate(context.args))


def _become(module: str, arguments: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


# ---------------------------------------------------------------------------------------------------------- calling


@app.command()
@grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue; -: read it from standard input")],
    connection: Connection,
    generating: Generating,
    n: Annotated[int, typer.Option(help="answers wanted: each is printed, or is a line of JSON, when it ends")] = 1,
    json: Json = False,
) -> None:
    """Continue a text, streaming to the terminal."""
    from deploy import calls

    with connection.client() as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        options = generating.options()
        if n != 1:
            options["n"] = n
        calls.generate(client, text, options, generating.deadline, json)


@app.command()
@grouped
def chat(
    connection: Connection,
    generating: Generating,
    message: Annotated[str | None, typer.Argument(help="one message; none: a conversation")] = None,
    system: Annotated[str, typer.Option(help="a system message to begin with")] = "",
    json: Json = False,
) -> None:
    """Talk with the model. Ctrl-C ends an answer, Ctrl-D the conversation; /reset forgets it.

    With --json each line of standard input is a message and each line of output an answer.
    """
    from deploy import calls

    with connection.client() as client:
        calls.chat(client, message, system, generating.options(), generating.deadline, json)


@app.command()
@grouped
def info(connection: Connection, json: Json = False) -> None:
    """Show the model served, the server's health and its counters."""
    from deploy import calls

    with connection.client() as client:
        calls.info(client, json)


@app.command()
@grouped
def reset_prefix_cache(connection: Connection, json: Json = False) -> None:
    """Let no request find anything in the prefix cache that was computed before."""
    from deploy import calls

    with connection.client() as client:
        calls.reset_prefix_cache(client, json)


@app.command()
@grouped
def top(
    connection: Connection,
    window: Annotated[float, typer.Option(min=1, max=60, help="seconds that numbers and graphs cover")] = 10.0,
    refresh: Annotated[float, typer.Option(min=0.1, max=60, help="seconds between two pictures")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="show one picture and leave")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="with --once: how long to watch before")] = 2.0,
    steps: Annotated[int, typer.Option(min=0, help="with --once: leave earlier, after so many steps; 0: do not")] = 0,
    json: Json = False,
) -> None:
    """Watch the steps of each executor: tokens, sequences, KV blocks, times. Ctrl-C leaves.

    On a terminal a live picture; into a pipe a line for each executor and second (with --json one object a second).
    """
    import asyncio

    from deploy.top import TopOptions, run_top

    options = TopOptions(window, refresh, once, json, seconds, steps)

    async def watch() -> None:
        await run_top(connection.async_client(), options)

    asyncio.run(watch())


# ----------------------------------------------------------------------------------------------------------- models


@models.command("pull")
def models_pull(
    model: Annotated[
        str, typer.Argument(help="a hub id, as owner/name or owner/name:Q8_0; none: the default model")
    ] = "",
    json: Json = False,
) -> None:
    """Fetch a model's files and print where they are."""
    from deploy import model_commands

    model_commands.pull_model(model, json)


@models.command("list")
def models_list(json: Json = False) -> None:
    """List the models on this machine."""
    from deploy import model_commands

    model_commands.list_all(json)


@models.command("path")
def models_path(
    model: Annotated[str, typer.Argument(help="a name or hub id; none: the default model")] = "", json: Json = False
) -> None:
    """Print where a model's files are; status 2 when they are not on this machine."""
    from deploy import model_commands

    model_commands.print_path(model, json)


# ---------------------------------------------------------------------------------------------------------- kernels


@kernels.command("build")
def kernels_build(json: Json = False) -> None:
    """Compile them for this processor unless that was done, and print where they are; else the first start does it."""
    from deploy.kernel_commands import build_kernels

    raise typer.Exit(build_kernels(json))


@kernels.command("status")
def kernels_status(json: Json = False) -> None:
    """Say whether they are there, and if not, why; status 2 then."""
    from deploy.kernel_commands import show_status

    raise typer.Exit(show_status(json))


# ------------------------------------------------------------------------------------------------------------ start


def main() -> None:
    """The console script: runs a command and turns every failure into one line and a status."""
    fill_standard_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command; returns its exit status and never raises an Exception."""
    if arguments in ([], ["models"], ["kernels"]):  # a group alone
        arguments = [*arguments, "--help"]
    try:
        status = app(args=arguments, prog_name="stepwire", standalone_mode=False)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left (`stepwire … | head`): nothing to say
        leave_standard_stream(sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the one place where a failure becomes a line for people
        return _report(error)
    return status if isinstance(status, int) else 0


def _report(error: Exception) -> int:
    if os.environ.get("STEPWIRE_TRACEBACK"):
        raise error
    from common.errors import ConfigError, ModelError
    from deploy.unreachable import why_unreachable
    from stepwire_client import StepwireError, Unavailable

    match error:
        case typer.Abort():
            return 130
        case ConfigError() | ModelError():
            text, status = error.message, 2
        case Unavailable() if not error.reason:
            text, status = why_unreachable(error.message), 1
        case StepwireError():
            details = ", ".join(part for part in (error.status, error.reason, error.field, error.limit) if part)
            text, status = f"{error.message} ({details})", 1
        case _ if hasattr(error, "format_message"):  # click's own: usage
            text, status = f"{error.format_message()} (see stepwire --help)", 2
        case OSError():
            text, status = f"{error.filename}: {error.strerror}" if error.filename else str(error), 1
        case ValueError():
            text, status = str(error), 2
        case _:
            text = f"{type(error).__name__}: {error} (a defect: STEPWIRE_TRACEBACK=1 shows where)"
            status = 1
    print(f"stepwire: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
