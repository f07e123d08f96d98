"""Puts a runner together: sizes the cache, settles the numerics, captures or warms up what steady steps use."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

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
    cuda_available,
    cuda_free,
    host_available,
    plan_num_blocks,
)
from executor_svc.models.decoder import Decoder, LayerWeights
from executor_svc.numerics import ExactOps, FastOps, can_pack
from executor_svc.runner import Runner
from executor_svc.step_kernels import step_kernels
from executor_svc.step_model import Model
from executor_svc.streams import Device, Stream

log = logging.getLogger(__name__)

# Rows beyond max_num_seqs, for sequences that are gone but still named by steps in flight.
LIMBO_ROWS = 64
# Longest context with a graph on a GPU where attention gathers rows x context, which at a model's longest context would
# not fit beside the cache. Longer ones run eagerly.
GRAPH_CONTEXT = 4096
FEATURES = ("logprobs", "prompt_logprobs", "raw_logits", "penalties", "bias", "allowed_ids", "min_tokens", "copies")

# What is being done, how far it is and how far it goes.
Progress = Callable[[str, int, int], None]


def make_ops(numerics: str, device: torch.device | None = None) -> FastOps | ExactOps:
    """The operations a model is built with. `numerics`: "fast" or "exact". `device`: the model's; None: a CPU."""
    if numerics not in ("fast", "exact"):
        raise ConfigError(f"numerics is fast or exact, not {numerics!r}", field="numerics")
    if numerics == "exact":
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
    say: Progress = progress or (lambda what, done, total: None)
    config = model.config
    context = min(config.max_positions, max_context or config.max_positions)
    max_blocks = -(-context // block_size)
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
    available = host_available() if on_cpu else cuda_available(device.torch_device)
    count = plan_num_blocks(
        shape,
        available_bytes=available - _activation_bytes(model, max_tokens_per_step, max_num_seqs, on_cuda=not on_cpu),
        share=CPU_SHARE if on_cpu else CUDA_SHARE,
        num_blocks=num_blocks,
        cache_bytes=kv_cache_memory,
        useful_blocks=(max_num_seqs + LIMBO_ROWS) * max_blocks,
        blocks_per_sequence=max_blocks,
    )
    cache = make_cache(shape, count, lambda size, dtype: device.zeros(*size, dtype=dtype))
    if buckets is None:
        buckets = () if on_cpu else default_buckets(max_num_seqs)
    graphs = GraphCache(buckets, _graph_contexts(backend, context, on_cpu))
    num_rows = max_num_seqs + LIMBO_ROWS
    state = RowState(device, num_rows, max_blocks, cache.null_block, config.vocab_size)
    if ops.has_kernels and not on_cpu:
        _settle_products(device, ops, model, say)
    rings = StepRings(device, pipeline_depth, _staging_bytes(max_tokens_per_step, num_rows), max_num_seqs)
    step = DeviceStep(model, backend, cache, state, graphs, rings, kernels=step_kernels(ops))
    # What was filled above ran on the default stream, which the others do not wait for.
    device.synchronize()
    _warm_up(device, step, graphs, max_num_seqs, max_tokens_per_step, context, say)
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
        step=step,
        cache=cache,
        state=state,
        graphs=graphs,
        rings=rings,
        clock=clock,
    )


def _graph_contexts(backend: AttentionBackend, context: int, on_cpu: bool) -> tuple[int, ...]:
    """Buckets of context that decode graphs are made for; a backend that gathers nothing needs one."""
    if not backend.gathers:
        return (context,)
    return context_buckets(context if on_cpu else min(context, GRAPH_CONTEXT))


def _settle_products(device: Device, ops: FastOps | ExactOps, model: Model, say: Progress) -> None:
    """Measures where a kernel of ours multiplies quicker than the library, with the model's own weights."""
    from executor_svc.triton_ops import TritonOps  # only now: a CPU's installation has no triton

    assert isinstance(ops, TritonOps)
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


def largest_chunks(num_rows: int, max_tokens: int, context: int) -> list[int]:
    """Chunks of the first rows of the largest step that so many rows can make; one row, if there are several, has no
    chunk but decodes."""
    chunks: list[int] = []
    left = max_tokens - num_rows  # beyond a token of each
    while not chunks or (left > 0 and len(chunks) < num_rows - 1):
        chunks.append(max(1, min(left + 1, context)))
        left -= chunks[-1] - 1
    return chunks


def _warm_up(
    device: Device,
    step: DeviceStep,
    graphs: GraphCache,
    max_num_seqs: int,
    max_tokens: int,
    context: int,
    say: Progress,
) -> None:
    """Runs steps of padding alone, the largest among them, and captures every graph, so that the first real step finds
    all made and all memory taken. context: of a row, which no chunk is longer than."""
    torch_device = device.torch_device
    on_cuda = torch_device.type == "cuda"
    taken: list[tuple[float, int]] = []

    def run_padding() -> None:
        for rows in sorted({1, min(8, max_num_seqs), max_num_seqs}, reverse=True):
            for full in (False, True) if on_cuda else (False,):
                step.run_padding(rows, full=full)
                if on_cuda:  # where kernels are compiled when they are first used, each for every way to call it
                    step.run_padding(rows, largest_chunks(rows, max_tokens, context), full=full)

    def capture() -> None:
        before = (time.perf_counter(), cuda_free(torch_device) if on_cuda else 0)
        step.prepare_graphs(graphs.row_buckets[-1])
        graphs.capture_all(
            step.body, torch_device, step.variants, lambda done, total: say("capturing graphs", done, total)
        )
        after = (time.perf_counter(), cuda_free(torch_device) if on_cuda else 0)
        taken.append((after[0] - before[0], before[1] - after[1]))

    say("warming up", 0, 1)
    device.enqueue(Stream.COMPUTE, run_padding)
    if graphs.row_buckets:
        device.enqueue(Stream.COMPUTE, capture)
    device.synchronize()
    if device.failure is not None:
        raise ConfigError(f"warm-up failed: {device.failure}", field="device") from device.failure
    for seconds, size in taken:
        log.info("%d graphs captured in %.1f s, %.1f MiB", graphs.num_graphs, seconds, size / (1 << 20))
    say("warming up", 1, 1)


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


def _activation_bytes(model: Model, max_tokens: int, max_num_seqs: int, *, on_cuda: bool) -> int:
    """An upper estimate of what one step takes beside weights and cache; on a GPU with what rows keep by token, which
    is made at start there."""
    config = model.config
    width = 8 * config.hidden_size + 4 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    by_token = 10 * (max_num_seqs + LIMBO_ROWS + 1) * config.vocab_size if on_cuda else 0
    return max_tokens * width * model.dtype.itemsize + 6 * max_num_seqs * config.vocab_size * 4 + by_token


def _staging_bytes(max_tokens: int, num_rows: int) -> int:
    """Room for the largest batch and the usual changes; larger ones take memory of their own."""
    return 3 * 8 * max_tokens + 160 * num_rows + 64 * 1024


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
