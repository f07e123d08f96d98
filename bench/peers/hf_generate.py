"""Hugging Face transformers (Apache-2.0): `generate`, which has no server: static batches of whatever waits.

The child reads a batch a line and answers a line a step; it has no way to take a request in while it runs, so a load
in which one arrives later (W4) is not asked of it.

    python -m bench.peers.hf_generate DIRECTORY DTYPE THREADS        the child
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.load import Ask, Sample, Workload
from bench.peers.base import START_S, STOP_S, Setup, python
from bench.peers.checkpoint import checkpoint

# A batch is complete when nobody has asked for so long.
_GATHER_S: Final = 0.01


class HfGenerate:
    def __init__(self, setup: Setup, name: str, weights: str, dtype: str) -> None:
        self.name = name
        self.weights = weights
        self._setup = setup
        self._dtype = dtype

    def missing(self) -> str:
        return "" if find_spec("transformers") and find_spec("torch") else "transformers and torch are not installed"

    def can_serve(self, load: Workload) -> bool:
        return not load.intruder

    def version(self) -> str:
        packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
        return f"{packages}: generate in {self._dtype}, {self._setup.threads} threads"

    @asynccontextmanager
    async def serving(self, load: Workload) -> AsyncIterator[Ask]:
        command = [*python(), "-m", "bench.peers.hf_generate", str(checkpoint(self._setup.model)), self._dtype]
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *command, str(self._setup.threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
            try:
                assert process.stdin is not None and process.stdout is not None
                async with asyncio.timeout(START_S):
                    ready = await process.stdout.readline()
                if not ready:
                    log.seek(0)
                    raise RuntimeError(f"{command} ended: {log.read()[-2000:].decode(errors='replace')}")
                batches = _Batches(process.stdin, process.stdout)
                serving = asyncio.ensure_future(batches.serve())
                try:
                    yield batches.ask
                finally:
                    serving.cancel()
                    with suppress(asyncio.CancelledError):
                        await serving
            finally:
                if process.stdin is not None:
                    process.stdin.close()  # which ends it
                try:
                    await asyncio.wait_for(process.wait(), STOP_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()


class _Batches:
    def __init__(self, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._waiting: asyncio.Queue[tuple[list[int], int, Sample, asyncio.Future[None]]] = asyncio.Queue()

    async def ask(self, prompt: Sequence[int], output: int, sample: Sample) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((list(prompt), output, sample, done))
        await done

    async def serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            with suppress(TimeoutError):
                while True:
                    batch.append(await asyncio.wait_for(self._waiting.get(), _GATHER_S))
            output = batch[0][1]
            line = json.dumps({"prompts": [prompt for prompt, _, _, _ in batch], "output": output})
            self._stdin.write(line.encode() + b"\n")
            try:
                for total in range(1, output + 1):
                    if not await self._stdout.readline():
                        raise RuntimeError("transformers' process ended")
                    for _, _, sample, _ in batch:
                        sample.arrived(total)
            except RuntimeError as error:
                for _, _, _, done in batch:
                    done.set_exception(error)
                return
            for _, _, _, done in batch:
                done.set_result(None)


def main(directory: Path, dtype: str, threads: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Lines(BaseStreamer):
        """One line a step; the first call brings the prompts."""

        is_prompt = True

        def put(self, value: Any) -> None:
            if not self.is_prompt:
                sys.stdout.write("\n")
                sys.stdout.flush()
            self.is_prompt = False

        def end(self) -> None:
            pass

    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    loaded.eval()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["prompts"])
        length = {"max_new_tokens": asked["output"], "min_new_tokens": asked["output"]}
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, streamer=Lines(), **length
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
