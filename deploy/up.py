"""`stepwire up`: one executor and one scheduler on this machine, a first answer, and how to call them.

Unless told otherwise the two meet on a unix socket in a private directory, so that several `up` run side by side and
need to differ in the public port alone; `--executor-listen` (or the executor's own setting anywhere) names another
address.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.config import Loaded, ServiceConfig, is_text, load_config
from common.config_sources import EXECUTOR_NAMES, SCHEDULER_NAMES, closest, flag_of
from common.errors import ConfigError
from common.model_files.catalog import pull
from deploy.how_to_call import address_to_call, how_to_call, own_folder
from deploy.log_lines import LogLines
from deploy.progress import ProgressLine
from deploy.supervisor import EXIT_FAILED, RestartPolicy, Service, Stopped, Supervisor, SupervisorError
from deploy.terminal import err, write_answer
from executor_svc.config import ExecutorConfig
from executor_svc.load_progress import has_terminal
from executor_svc.progress_bar import BarTeller
from scheduler_svc.config import SchedulerConfig
from stepwire_client import AsyncClient, Delta, Finished, Health, ModelInfo, Retry, StepwireError

# The default model's best first token leads by far here, so the answer is the same in every precision.
FIRST_PROMPT: Final = "Why is the sky blue?"
# Names that both services have and that can not mean both at once: alone they are the public service's.
SCHEDULER_FIRST: Final = frozenset({"listen", "address_file", "metrics_listen"})
PROBE_S: Final = 2.0
# Past the drain: last messages of streams, API processes that have to be killed, spans that nobody takes.
KILL_MARGIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class UpOptions:
    """`first_prompt` empty: none is sent. `once`: leave after its answer. `ready_s`: for both to serve."""

    first_prompt: str = FIRST_PROMPT
    first_max_tokens: int = 64
    once: bool = False
    ready_s: float = 600.0


def route_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags for the scheduler and for the executor, from the flags given to `up`.

    A flag goes to whichever service knows it, to both when both do. `--executor-NAME` and `--scheduler-NAME` address
    one of them; a bare `--listen` is the public API's. Raises ConfigError for what neither knows.
    """
    owners: dict[str, tuple[type[ServiceConfig], frozenset[str]]] = {
        "scheduler": (SchedulerConfig, SCHEDULER_NAMES),
        "executor": (ExecutorConfig, EXECUTOR_NAMES - SCHEDULER_FIRST),
    }
    routed: dict[str, list[str]] = {service: [] for service in owners}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, _ = argument.partition("=")
        taken = -1  # how many further arguments the flag takes; -1: nobody knows it
        for service, (kind, names) in owners.items():
            addressed = flag.startswith(f"--{service}-")
            plain = "--" + flag.removeprefix(f"--{service}-") if addressed else flag
            own = kind.model_fields.keys() if addressed else names
            truths = {flag_of(name) for name in own if kind.model_fields[name].annotation is bool}
            truth = plain in truths or plain.replace("--no-", "--", 1) in truths
            if truth or plain in {"--config", *map(flag_of, own)}:
                taken = 0 if truth or equals else 1
                routed[service] += [plain + argument[len(flag) :], *rest[:taken]]
        if taken < 0:
            every = [flag_of(name) for name in SCHEDULER_NAMES | EXECUTOR_NAMES]
            every += [f"--{s}-{flag_of(name)[2:]}" for s, (kind, _) in owners.items() for name in kind.model_fields]
            raise ConfigError(f"unknown flag {flag}{closest(flag, every)}", field=flag)
        del rest[:taken]
    return routed["scheduler"], routed["executor"]


def call_address(bound: str) -> str:
    """What a client on this machine dials for a bound address."""
    host, _, port = bound.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else bound


class _Up:
    """Addresses, commands and probes of one run. `directory`: private, gone at the end."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], directory: Path) -> None:
        self.scheduler_flags, self.executor_flags = route_flags(argv)
        self.scheduler: Loaded[SchedulerConfig] = load_config(SchedulerConfig, self.scheduler_flags, environ)
        self.executor: Loaded[ExecutorConfig] = load_config(ExecutorConfig, self.executor_flags, environ)
        if (source := self.scheduler.sources["executors"]) != "default":
            raise ConfigError(
                f"executors ({source}): stepwire up starts its own executor; for others use stepwire scheduler"
            )
        self.scheduler_file = self.scheduler.config.address_file or directory / "scheduler.address"
        self.executor_file = self.executor.config.address_file or directory / "executor.address"
        if self.scheduler_file == self.executor_file:
            raise ConfigError(f"address_file: both services would write {self.executor_file}; name one for each")
        for file in (self.scheduler_file, self.executor_file):
            file.unlink(missing_ok=True)  # one left by an earlier run would be taken for this one's
        self._executor_listen = self._choose_executor_listen(directory)
        self._draws = self.executor.config.progress == "auto" and has_terminal()
        self.log = LogLines(BarTeller() if self._draws else None)
        self._clients: dict[str, AsyncClient] = {}
        self.info: ModelInfo | None = None  # once the first prompt has asked

    def _choose_executor_listen(self, directory: Path) -> str:
        source = self.executor.sources["listen"]
        if source.startswith("flag") or "STEPWIRE_EXECUTOR_" in source or source.endswith(": executor.listen"):
            return self.executor.config.listen
        socket = directory / "executor.sock"
        return f"unix:{socket}" if len(os.fsencode(socket)) <= 107 else "127.0.0.1:0"

    def models(self) -> list[str]:
        """What the two are told to serve: one entry, unless they were told differently."""
        return sorted({self.scheduler.config.model, self.executor.config.model})

    def executor_command(self) -> list[str]:
        # A port once drawn stays, or the scheduler would never find the restarted executor.
        listen = _read_address(self.executor_file) or self._executor_listen
        own = ["--listen", listen, "--address-file", str(self.executor_file)]
        if self._draws:  # its own standard error is a pipe
            own += ["--progress", "json"]
        return [sys.executable, "-P", "-m", "executor_svc", *self.executor_flags, *own]

    def scheduler_command(self) -> list[str]:
        executor = call_address(_read_address(self.executor_file) or self._executor_listen)
        own = ["--executors", executor, "--address-file", str(self.scheduler_file)]
        return [sys.executable, "-P", "-m", "scheduler_svc", *self.scheduler_flags, *own]

    async def executor_bound(self) -> bool:
        return bool(_read_address(self.executor_file))

    async def executor_ready(self) -> bool:
        return await self._serving(self.executor_file, "")

    async def scheduler_ready(self) -> bool:
        if self.scheduler.config.tls_cert is not None:
            # Its certificate need not name an address this process can dial.
            return bool(_read_address(self.scheduler_file)) and await self.executor_ready()
        return await self._serving(self.scheduler_file, "stepwire.v1.Inference")

    async def _serving(self, file: Path, service: str) -> bool:
        address = _read_address(file)
        if not address:
            return False
        if address not in self._clients:
            self._clients[address] = AsyncClient(call_address(address), retry=Retry(attempts=1))
        try:
            return await self._clients[address].health(service, deadline=PROBE_S) is Health.SERVING
        except StepwireError:
            return False

    def public_address(self) -> str:
        return call_address(_read_address(self.scheduler_file))

    def note(self, text: str) -> None:
        """Of the supervisor's own; what is told then is that a service ended or is to end."""
        self.log.close()
        self.log.write("up", text)

    async def close(self) -> None:
        self.log.close()
        for client in self._clients.values():
            await client.close()


def _read_address(file: Path) -> str:
    """The address a service wrote, of several the one to call first; empty: not yet."""
    try:
        return file.read_text().partition("\n")[0].strip()
    except FileNotFoundError:
        return ""


def run_up(argv: Sequence[str], options: UpOptions, environ: Mapping[str, str] | None = None) -> int:
    """Serves until stopped; returns the exit status. Raises ConfigError and ModelError before anything is started."""
    if not is_text(options.first_prompt):
        raise ConfigError(f"first_prompt {options.first_prompt!a}: not UTF-8 text", field="first_prompt")
    with tempfile.TemporaryDirectory(prefix="stepwire-") as directory:
        up = _Up(argv, os.environ if environ is None else environ, Path(directory))
        if options.first_prompt and up.scheduler.config.tls_cert is not None:
            raise ConfigError("the first prompt is sent in plain text: with tls_cert give --no-first-prompt")
        progress = ProgressLine()
        for model in up.models():
            pull(model, progress)
        progress.done()
        return asyncio.run(_serve(up, options))


async def _serve(up: _Up, options: UpOptions) -> int:
    supervisor = Supervisor(
        Service("executor", up.executor_command, up.executor_ready, up.executor.config.drain_s + KILL_MARGIN_S),
        Service("scheduler", up.scheduler_command, up.scheduler_ready, up.scheduler.config.drain_s + KILL_MARGIN_S),
        bound=up.executor_bound,
        lines=up.log.write,
        note=up.note,
        ready_s=options.ready_s,
        policy=RestartPolicy(),
    )
    try:
        async with supervisor.running():
            if options.first_prompt:
                await supervisor.until(_first_answer(up, options))
            if options.once:
                return 0
            address = await address_to_call(up.public_address(), up.scheduler.config)
            err(how_to_call(address, up.scheduler.config, own_folder(), up.info))
            await supervisor.watch()
    except Stopped:
        return 0
    except SupervisorError as error:
        err(f"stepwire up: {error.message}")
        return error.exit_status
    except StepwireError as error:
        err(f"stepwire up: the first prompt failed: {error.message} ({error.status})")
        return EXIT_FAILED
    finally:
        await up.close()
    return EXIT_FAILED


async def _first_answer(up: _Up, options: UpOptions) -> None:
    """Sends the first prompt through the public API and streams its answer to standard output."""
    from scheduler_svc.api.auth import read_tokens

    tokens_file = up.scheduler.config.auth_tokens_file
    token = read_tokens(tokens_file)[0] if tokens_file else None
    async with AsyncClient(up.public_address(), token=token) as client:
        up.info = info = await client.model_info(deadline=30)
        if not info.has_tokenizer:
            up.log.write("up", "the model has no tokenizer: no first prompt")
            return
        err(f"\n> {options.first_prompt}")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stream = (
            client.generate(
                messages=[{"role": "user", "content": options.first_prompt}],
                max_tokens=options.first_max_tokens,
                temperature=0.0,
            )
            if info.has_chat_template
            else client.generate(options.first_prompt, max_tokens=options.first_max_tokens, temperature=0.0)
        )
        async with stream:
            with up.log.held():
                async for event in stream:
                    if isinstance(event, Delta):
                        write_answer(event.text)
                    elif isinstance(event, Finished):
                        write_answer("\n")
                        seconds = loop.time() - begun
                        count = event.usage.completion_tokens
                        err(f"({count} tokens in {seconds:.2f} s, {event.reason})\n")
