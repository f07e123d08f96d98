"""Puts a runner together: sizes the cache, settles the numerics, captures or warms up what steady steps use."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from common.clock import Clock
from common.errors import ConfigError
from common.messages import ExecutorInfo
from executor_svc.attention.layout import AttentionBackend, AttentionShape
from executor_svc.attention.registry import make_backend
from executor_svc.buffers import RowState, StepRings
from executor_svc.cpu_device import CpuDevice
from executor_svc.cuda_device import CudaDevice
from executor_svc.device_step import DeviceStep
from executor_svc.environment import why_no_triton
from executor_svc.graph_cache import GraphCache, context_buckets
from executor_svc.kernels_cpu.cache import NativeCache
from executor_svc.kernels_cpu.decoder import NativeAttention, NativeDecoder
from executor_svc.kv_cache import (
    CPU_SHARE,
    CUDA_SHARE,
    KvCache,
    KvShape,
    host_available,
    plan_num_blocks,
)
from executor_svc.load_progress import Progress, no_progress
from executor_svc.memory_errors import lacks_memory
from executor_svc.models.decoder import Decoder, LayerWeights
from executor_svc.numerics import ExactOps, FastOps, can_pack
from executor_svc.runner import Runner
from executor_svc.step_kernels import step_kernels
from executor_svc.step_model import Model
from executor_svc.streams import Device, Stream
from executor_svc.warm_up import Steps, WarmUp

log = logging.getLogger(__name__)

# Rows beyond max_num_seqs, for sequences that are gone but still named by steps in flight.
LIMBO_ROWS = 64
# Longest context with a graph on a GPU where attention gathers rows x context, which at a model's longest context would
# not fit beside the cache. Longer ones run eagerly.
GRAPH_CONTEXT = 4096
FEATURES = ("logprobs", "prompt_logprobs", "raw_logits", "penalties", "bias", "allowed_ids", "min_tokens", "copies")


def make_ops(numerics: str, device: torch.device | None = None) -> FastOps | ExactOps:
    """The operations a model is built with. `numerics`: "fast" or "exact". `device`: the model's; None: a CPU."""
    if numerics not in ("fast", "exact"):
        raise ConfigError(f"numerics is fast or exact, not {numerics!r}", field="numerics")
    if numerics == "exact":
        # Some images (NVIDIA's of torch, by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE) have products of float32 rounded to TF32.
        torch.set_float32_matmul_precision("highest")
        return ExactOps()
    if device is not None and device.type == "cuda":
        reason = why_no_triton()
        if not reason:
            from executor_svc.triton_ops import TritonOps  # only now: a CPU's installation has no triton

            return TritonOps()
        log.warning("steps run on torch's operators, not in Triton's kernels: %s", reason)
    return FastOps()


def default_dtype(numerics: str, device: str) -> torch.dtype | None:
    """What "auto" means; None: the model's own.

    On the CPU bfloat16 where the processor multiplies it (it halves what a decode step reads), else float32.
    """
    if numerics == "exact":
        return torch.float32
    if device == "cpu":
        return torch.bfloat16 if can_pack() else torch.float32
    return None


def make_device(name: str, *, threads: int = 0, cpu: int | None = None) -> Device:
    """`name`: "cpu", "cuda", "cuda:N" or "auto"; `cpu`: see CpuDevice. Raises ConfigError when there is no such."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(threads=threads, cpu=cpu)
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise ConfigError(f"unknown device {name!r}", field="device")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU alone"
        found = f"torch {torch.__version__}, built {built}, finds {torch.cuda.device_count()}"
        raise ConfigError(f"there is no {name} device: {found}", field="device")
    return CudaDevice(int(index or 0))


def build_runner(
    model: Model,
    *,
    ops: FastOps | ExactOps,
    device: Device,
    block_size: int = 16,
    num_blocks: int = 0,
    kv_cache_memory: int = 0,
    max_num_seqs: int = 64,
    max_tokens_per_step: int = 512,
    max_context: int = 0,
    pipeline_depth: int = 4,
    buckets: Sequence[int] | None = None,
    attention_backend: str | AttentionBackend = "auto",
    model_id: str = "",
    model_hash: str = "",
    eos_ids: Iterable[int] = (),
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Runner:
    """`model` was built with `ops` and lies on `device`. Zeros mean: measured, or the model's own.

    `buckets`: decode batch sizes with a graph, ascending; None: those of `default_buckets` on CUDA,
    none on the CPU, where padding costs and a replay saves nothing. `attention_backend`: a name, or one made elsewhere.
    Raises ConfigError.
    """
    say = progress or no_progress
    config = model.config
    context = min(config.max_positions, max_context or config.max_positions)
    max_blocks = -(-context // block_size)
    on_cpu = device.torch_device.type == "cpu"
    _settle(ops, model, device, say)
    attention_shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, config.windows)
    shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, block_size, model.dtype)
    backend: AttentionBackend
    make_cache: type[KvCache] = KvCache
    if isinstance(model, NativeDecoder):
        backend, make_cache = NativeAttention(), NativeCache
    elif isinstance(attention_backend, str):
        backend = make_backend(attention_backend, attention_shape, shape, ops, device.torch_device)
    else:
        backend = attention_backend
    if buckets is None:
        buckets = () if on_cpu else default_buckets(max_num_seqs)
    contexts = _graph_contexts(backend, context, on_cpu)
    num_rows = max_num_seqs + LIMBO_ROWS
    warm_up = WarmUp(device, max_num_seqs, max_tokens_per_step, context, say)

    def make(count: int) -> _Parts:
        try:
            cache = make_cache(shape, count, lambda size, dtype: device.zeros(*size, dtype=dtype))
            state = RowState(device, num_rows, max_blocks, cache.null_block, config.vocab_size)
            rings = StepRings(device, pipeline_depth, _staging_bytes(max_tokens_per_step, num_rows), max_num_seqs)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            text = f"there is no memory for {count} KV blocks and the state of {num_rows} rows: {error}"
            raise ConfigError(text, field="num_blocks" if num_blocks else "kv_cache_memory") from error
        graphs = GraphCache(buckets, contexts)
        step = DeviceStep(model, backend, cache, state, graphs, rings, kernels=step_kernels(ops))
        # What was filled above ran on the default stream, which the others do not wait for.
        device.synchronize()
        return _Parts(cache, state, rings, graphs, step)

    memory, held = device.memory, None
    if memory is not None:
        memory.give_back()
    free = host_available() if memory is None else memory.free_bytes()
    if memory is None or num_blocks:  # an explicit number is believed: nothing is tried first
        taken = _activation_bytes(model, max_tokens_per_step, max_num_seqs, by_token=memory is not None)
    else:
        held = warm_up.measure(lambda: make(1).steps, memory)
        taken = held.total
    count = plan_num_blocks(
        shape,
        available_bytes=free - taken,
        share=CPU_SHARE if memory is None else CUDA_SHARE,
        num_blocks=num_blocks,
        cache_bytes=kv_cache_memory,
        useful_blocks=num_rows * max_blocks,
        blocks_per_sequence=max_blocks,
        note="" if held is None else str(held),
    )
    parts = make(count)
    warm_up.run(*parts.steps, held)
    info = ExecutorInfo(
        model_id=model_id,
        model_hash=model_hash,
        vocab_size=config.vocab_size,
        eos_ids=tuple(sorted(set(eos_ids))),
        num_rows=num_rows,
        max_num_seqs=max_num_seqs,
        max_blocks_per_row=max_blocks,
        block_size=block_size,
        num_blocks=count,
        max_tokens_per_step=max_tokens_per_step,
        max_context=context,
        buckets=tuple(buckets),
        numerics=ops.name,
        kv_dtype=_dtype_name(model.dtype),
        features=FEATURES,
        device=device.name,
        dtype=_dtype_name(model.dtype),
    )
    log.info("%d KV blocks of %d tokens, %d bytes", count, block_size, count * shape.block_bytes)
    return Runner(
        info=info,
        device=device,
        step=parts.step,
        cache=parts.cache,
        state=parts.state,
        graphs=parts.graphs,
        rings=parts.rings,
        clock=clock,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What hangs on the size of the cache."""

    cache: KvCache
    state: RowState
    rings: StepRings
    graphs: GraphCache
    step: DeviceStep

    @property
    def steps(self) -> Steps:
        return self.step, self.graphs


def _graph_contexts(backend: AttentionBackend, context: int, on_cpu: bool) -> tuple[int, ...]:
    """Buckets of context that decode graphs are made for; a backend that gathers nothing needs one."""
    if not backend.gathers:
        return (context,)
    return context_buckets(context if on_cpu else min(context, GRAPH_CONTEXT))


def _settle(ops: FastOps | ExactOps, model: Model, device: Device, say: Progress) -> None:
    """Readies the operations for the model's own weights on this device. Raises ConfigError."""
    on_cpu = device.torch_device.type == "cpu"
    if isinstance(ops, ExactOps):
        if model.dtype is not torch.float32:
            raise ConfigError(f"exact numerics need float32, not {model.dtype}", field="dtype")
        say("checking numerics", 0, 1)
        ops.settle(_weight_shapes(model), model.device)
        say("checking numerics", 1, 1)
    elif isinstance(model, Decoder) and on_cpu and model.dtype is torch.bfloat16 and can_pack():
        say("packing weights", 0, 1)
        ops.pack(_weights(model))
        say("packing weights", 1, 1)
    elif ops.has_kernels and not on_cpu:
        _settle_products(device, ops, model, say)


def _settle_products(device: Device, ops: FastOps | ExactOps, model: Model, say: Progress) -> None:
    """Measures where a kernel of ours multiplies quicker than the library, with the model's own weights."""
    from executor_svc.triton_ops import TritonOps  # only now: a CPU's installation has no triton

    assert isinstance(ops, TritonOps)
    device.synchronize()  # weights were filled on the default stream
    say("measuring products", 0, 1)
    device.enqueue(Stream.COMPUTE, lambda: ops.settle(_weights(model)))
    device.synchronize()
    if device.failure is not None:
        raise ConfigError(f"measuring products failed: {device.failure}", field="device") from device.failure
    say("measuring products", 1, 1)


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8 to 256, every 16 beyond; at most max_num_seqs, which is one itself."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16)}
    return tuple(sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs}))


def _weights(model: Model) -> Iterable[torch.Tensor]:
    """Matrices the model multiplies with."""
    if isinstance(model, Decoder):
        for layer in model.weights.layers:
            for name in LayerWeights.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None and tensor.dim() == 2:
                    yield tensor
        yield model.weights.head


def _weight_shapes(model: Model) -> set[tuple[int, int]]:
    return {(weight.shape[0], weight.shape[1]) for weight in _weights(model)}


def _activation_bytes(model: Model, max_tokens: int, max_num_seqs: int, *, by_token: bool) -> int:
    """An upper estimate of what one step takes beside weights and cache. `by_token`: and what rows keep by token, where
    that is made at start."""
    config = model.config
    width = 8 * config.hidden_size + 4 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    kept = 10 * (max_num_seqs + LIMBO_ROWS + 1) * config.vocab_size if by_token else 0
    return max_tokens * width * model.dtype.itemsize + 6 * max_num_seqs * config.vocab_size * 4 + kept


def _staging_bytes(max_tokens: int, num_rows: int) -> int:
    """Room for the largest batch and the usual changes; larger ones take memory of their own."""
    return 3 * 8 * max_tokens + 160 * num_rows + 64 * 1024


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
