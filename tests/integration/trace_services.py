"""Real scheduler and executor processes for the trace tests, and a client."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import save_file

from common.model_files.describe import read_model
from common.telemetry.context import TraceContext
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
READY_LIMIT_S = 60.0
CALL_LIMIT_S = 90.0
STOP_LIMIT_S = 15.0


def write_model(directory: Path) -> Path:
    """A Llama of one layer with random weights; no tokenizer."""
    hidden, inner, heads, vocab = 32, 64, 2, 1000
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        layer + "input_layernorm.weight": (hidden,),
        layer + "post_attention_layernorm.weight": (hidden,),
        **{f"{layer}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
        layer + "mlp.gate_proj.weight": (inner, hidden),
        layer + "mlp.up_proj.weight": (inner, hidden),
        layer + "mlp.down_proj.weight": (hidden, inner),
    }
    random = np.random.default_rng(7)
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Services:
    """One executor and one scheduler process."""

    def __init__(self, directory: Path, endpoint: str, *, toy: bool, flags: Sequence[str] = ()) -> None:
        self._directory = directory
        model = write_model(directory / "model")
        sizes = ("--block-size", "16", "--num-blocks", "1024", "--max-num-seqs", "16")
        self._executor: tuple[str, ...]
        if toy:
            toy_model = ("--model-hash", read_model(model).description.hash)
            self._executor = ("tests.fakes.toy_executor_main", *toy_model, *sizes, "--block-size", "128")
        else:
            self._executor = ("executor_svc", *sizes, "--model", str(model), "--device", "cpu", "--threads", "1")
        self._scheduler = ("scheduler_svc", "--model", str(model), "--max-prefill-chunk", "16", *flags)
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "STEPWIRE_"))}
        self._environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")])}
        if endpoint:
            self._environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        executor = self._start("executor", self._executor)
        self.address = self._start("scheduler", (*self._scheduler, "--executors", executor))
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            deadline = time.monotonic() + READY_LIMIT_S
            while True:
                with contextlib.suppress(grpc.RpcError):
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                self._check(deadline)

    def kill_executor_and_start_another(self) -> None:
        """On the same address."""
        address_file = self._directory / "executor.address"
        address = address_file.read_text().strip()
        self._running["executor"].kill()
        self._running["executor"].wait()
        address_file.unlink()
        self._start("executor", self._executor, address)

    def _start(self, name: str, module_and_flags: Sequence[str], listen: str = "127.0.0.1:0") -> str:
        """The address it listens on."""
        module, *flags = module_and_flags
        address_file = self._directory / f"{name}.address"
        command = [sys.executable, "-P", "-m", module, "--listen", listen, "--address-file", str(address_file)]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*command, *flags], env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + READY_LIMIT_S
        while not address_file.exists():
            self._check(deadline)
        return address_file.read_text().split()[0]

    def _check(self, deadline: float) -> None:
        for name, process in self._running.items():
            assert process.poll() is None, f"{name} left:\n{self.log(name)}"
        assert time.monotonic() < deadline, "\n".join(self.log(name) for name in self._running)
        time.sleep(0.02)

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(errors="replace")

    def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Scheduler, then executor, each within `limit_s`."""
        for name in ("scheduler", "executor"):
            process = self._running[name]
            process.send_signal(signal.SIGTERM)
            assert process.wait(limit_s) == 0, self.log(name)

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def services(directory: Path, endpoint: str, *, toy: bool = False, flags: Sequence[str] = ()) -> Iterator[Services]:
    """`flags`: the scheduler's."""
    directory.mkdir(parents=True, exist_ok=True)
    running = Services(directory, endpoint, toy=toy, flags=flags)
    try:
        running.start()
        yield running
    finally:
        running.kill()


def generate(
    address: str,
    caller: TraceContext | None,
    prompt: int,
    max_tokens: int,
    on_message: Callable[[int], None] = lambda number: None,
) -> int:
    """The number of tokens that came. `on_message` is told the number of each message, from 0."""
    request = pb.GenerateRequest(
        # Prompts of different lengths share no prefix, so none is found in the cache.
        token_ids=pb.TokenIds(ids=[3 + (prompt + i) % 900 for i in range(prompt)]),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputOptions(detokenize=False),
    )
    metadata = (("traceparent", caller.traceparent),) if caller else ()
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        messages = stub.Generate(request, metadata=metadata, timeout=CALL_LIMIT_S)
        tokens = 0
        for number, message in enumerate(messages):
            tokens += len(message.delta.token_ids)
            on_message(number)
        return tokens
