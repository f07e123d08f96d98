"""Ourselves: both services as `stepwire up` starts them, asked through the public API, text of the answer included."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from bench.load import Ask, Workload
from bench.peers.base import Setup, address_in, child, python
from bench.serving import asking, commit
from stepwire_client import AsyncClient, Health, Retry, StepwireError
from stepwire_client._gen.stepwire.v1 import inference_pb2_grpc as rpc


class Stepwire:
    """`flags`: of `stepwire up`, none: its defaults."""

    def __init__(self, setup: Setup, name: str, weights: str, flags: tuple[str, ...] = ()) -> None:
        self.name = name
        self.weights = weights
        self._flags = (*flags, "--model", str(setup.model), "--threads", str(setup.threads))

    def missing(self) -> str:
        return ""

    def can_serve(self, load: Workload) -> bool:
        return True

    def version(self) -> str:
        return f"{commit()}: up {' '.join(self._flags)}"

    @asynccontextmanager
    async def serving(self, load: Workload) -> AsyncIterator[Ask]:
        with tempfile.TemporaryDirectory(prefix="stepwire-bench-") as directory:
            file = Path(directory, "address")
            own = ("--listen", "127.0.0.1:0", "--scheduler-address-file", str(file), "--no-first-prompt")
            with child([*python(), "-m", "deploy.cli", "up", *own, *self._flags]) as process:

                async def is_serving() -> bool:
                    if not (address := address_in(file)):
                        return False
                    try:
                        async with AsyncClient(address, retry=Retry(attempts=1)) as client:
                            return await client.health("stepwire.v1.Inference", deadline=2.0) is Health.SERVING
                    except StepwireError:
                        return False

                await process.until(is_serving)
                async with grpc.aio.insecure_channel(address_in(file)) as channel:
                    yield asking(rpc.InferenceStub(channel), detokenize=True)
