"""Executors of one size, so that one set of plans fits them all; kinds.py says which the contract holds for."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from executor_svc.attention.layout import AttentionBackend, AttentionShape
from executor_svc.attention.varlen import VarlenAttention
from executor_svc.build import build_runner, make_ops
from executor_svc.cpu_device import CpuDevice
from executor_svc.kernels_cpu.compile import NoKernels
from executor_svc.kernels_cpu.decoder import NativeDecoder, pack_decoder
from executor_svc.kernels_cpu.library import load_library
from executor_svc.kernels_cpu.packing import Format
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.numerics import ExactOps, FastOps
from executor_svc.runner import Runner
from executor_svc.streams import Device
from tests.fakes.toy_executor import ToyExecutor, toy_info
from tests.random_model import random_decoder, random_weights
from tests.varlen_reference import varlen_reference

VOCAB = 97
BLOCK_SIZE = 4
NUM_BLOCKS = 96
MAX_SEQS = 8
MAX_TOKENS = 32
MAX_CONTEXT = 64
EOS = 2
NAN_TOKEN = 96


def tiny_config(*, window: int = 0, num_layers: int = 2) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=MAX_CONTEXT,
        windows=(0, window)[:num_layers],
    )


def tiny_model(
    ops: FastOps | ExactOps,
    *,
    nan_token: bool = False,
    window: int = 0,
    num_layers: int = 2,
    device: torch.device | None = None,
) -> Decoder:
    """Random weights, wide enough apart that no token hangs on a last bit."""
    where = device or torch.device("cpu")
    model = random_decoder(tiny_config(window=window, num_layers=num_layers), ops, scale=0.3)
    if nan_token:
        model.weights.embedding[NAN_TOKEN] = torch.nan
    if where.type != "cpu":
        return _moved(model, ops, where)
    return model


def _moved(model: Decoder, ops: FastOps | ExactOps, where: torch.device) -> Decoder:
    """Drawn on the CPU, so that a device gives the tokens the CPU gives."""
    weights = model.weights
    for layer in weights.layers:
        for name in type(layer).__slots__:
            tensor = getattr(layer, name)
            if tensor is not None:
                setattr(layer, name, tensor.to(where))
    weights.embedding, weights.final_norm, weights.head = (
        t.to(where) for t in (weights.embedding, weights.final_norm, weights.head)
    )
    return Decoder(model.config, weights, ops)


def tiny_runner(
    *,
    numerics: str = "exact",
    device: Device | None = None,
    nan_token: bool = False,
    window: int = 0,
    num_layers: int = 2,
    depth: int = 4,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = NUM_BLOCKS,
    max_tokens: int = MAX_TOKENS,
    buckets: Sequence[int] = (),
    attention_backend: str | AttentionBackend = "auto",
) -> Runner:
    device = device or CpuDevice(threads=1)
    ops = make_ops(numerics, device.torch_device)
    if attention_backend == "triton":
        ops = interpreted(ops)
    return build_runner(
        tiny_model(ops, nan_token=nan_token, window=window, num_layers=num_layers, device=device.torch_device),
        ops=ops,
        device=device,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=MAX_SEQS,
        max_tokens_per_step=max_tokens,
        pipeline_depth=depth,
        buckets=buckets,
        attention_backend=attention_backend,
        model_id="tiny",
        model_hash="tiny-0",
        eos_ids=(EOS,),
    )


def native_runner(
    weights: Format = Format.DENSE,
    *,
    device: Device | None = None,
    nan_token: bool = False,
    depth: int = 4,
    buckets: Sequence[int] = (),
) -> Runner:
    """The CPU kernels, which want sizes that are multiples of 32. Skips where this machine can not build them."""
    try:
        library = load_library()
    except NoKernels as error:
        pytest.skip(str(error))
    config = replace(tiny_config(), intermediate_size=64, head_dim=32)
    drawn = random_weights(config, scale=0.3)
    if nan_token:
        drawn.embedding[NAN_TOKEN] = torch.nan
    return build_runner(
        NativeDecoder(config, pack_decoder(config, drawn, weights), library, threads=2),
        ops=make_ops("fast"),
        device=device or CpuDevice(threads=1),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_SEQS,
        max_tokens_per_step=MAX_TOKENS,
        pipeline_depth=depth,
        buckets=buckets,
        model_id="tiny",
        model_hash="tiny-0",
        eos_ids=(EOS,),
    )


def interpreted(ops: FastOps | ExactOps) -> FastOps | ExactOps:
    """What goes with the kernels on a CPU too, where Triton's interpreter runs them; loads triton."""
    import tests.interpreter  # noqa: F401
    from executor_svc.triton_ops import TritonOps

    return ops if isinstance(ops, ExactOps) else TritonOps()


def tiny_varlen() -> VarlenAttention:
    """Over a plain stand-in for torch's varlen_attn, which needs CUDA; tests/gpu says that it means the same."""
    config = tiny_config()
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.windows)
    return VarlenAttention(shape, varlen_reference, with_key_offsets=True)


def tiny_toy(*, nan_token: bool = False) -> ToyExecutor:
    info = toy_info(
        vocab_size=VOCAB,
        eos_ids=(EOS,),
        num_rows=MAX_SEQS + 64,
        max_num_seqs=MAX_SEQS,
        max_blocks_per_row=MAX_CONTEXT // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_tokens_per_step=MAX_TOKENS,
    )
    return ToyExecutor(info, nan_token=NAN_TOKEN if nan_token else None)
