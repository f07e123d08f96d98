"""From configuration to a Runner with its model loaded. Imports torch, so it is imported late and in the loader's
thread: the port answers meanwhile."""

import logging

import torch

from common.errors import ConfigError
from common.model_files.description import ModelFiles
from executor_svc.build import build_runner, default_dtype, make_device, make_ops
from executor_svc.config import ExecutorConfig
from executor_svc.environment import cgroup_cpus, own_cpus, why_no_triton
from executor_svc.host_memory import take_pages
from executor_svc.kernels_cpu.compile import NoKernels
from executor_svc.kernels_cpu.decoder import unsupported
from executor_svc.kernels_cpu.library import Library, build_library, find_library
from executor_svc.kernels_cpu.load import load_native
from executor_svc.kernels_cpu.packing import Format
from executor_svc.kv_cache import KvCache
from executor_svc.load_progress import Progress
from executor_svc.loader.load import load_model, model_config, model_dtype
from executor_svc.numerics import can_pack
from executor_svc.runner import Runner
from executor_svc.step_costs import measure_costs
from executor_svc.step_model import Model
from executor_svc.streams import Device
from executor_svc.weights_fit import check_weights_fit, loaded_bytes, native_bytes, room_on

log = logging.getLogger(__name__)

# A chunk is what running sequences wait for: on a CPU half a second at 512 tokens of a 135M model.
_MAX_TOKENS_PER_STEP = {"cpu": 512, "cuda": 2048}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FORMATS = {"auto": None, "dense": Format.DENSE, "int8": Format.INT8, "int4": Format.INT4}
# A start may take so much longer, that no prompt waits for memory.
_TAKING_S = 1.0


def build_executor(config: ExecutorConfig, files: ModelFiles, max_pipeline_depth: int, progress: Progress) -> Runner:
    """Blocks for as long as loading takes. Raises ConfigError and ModelError."""
    description = files.description
    kernels = _cpu_kernels(config, files, progress)
    model: Model
    if kernels is not None:
        threads = compute_threads(config) or torch.get_num_threads()
        # What torch still does in a step is small; its threads would spin beside the kernels' own.
        cpus = own_cpus(threads)
        device = make_device("cpu", threads=1, cpu=cpus[0] if cpus else None)
        ops = make_ops(config.numerics, device.torch_device)
        log.info("loading %s (%s) for the CPU kernels, %d threads", description.id, files.path, threads)
        native = load_native(
            files,
            model_config(files),
            kernels,
            wanted=_FORMATS[config.weight_dtype],
            threads=threads,
            cpus=cpus,
            progress=progress,
            max_positions=config.max_context or None,
        )
        log.info("weights: %s, %d bytes read in each step", native.weights.formats, native.weights.step_bytes)
        model = native
    else:
        device = make_device(config.device, threads=compute_threads(config))
        _set_early_launch(config, device)
        ops = make_ops(config.numerics, device.torch_device)
        kind = device.torch_device.type
        dtype = _DTYPES.get(config.dtype) or default_dtype(config.numerics, kind) or model_dtype(files)
        packed = kind == "cpu" and config.numerics == "fast" and dtype is torch.bfloat16 and can_pack()
        _check_fit(
            config,
            files,
            device.torch_device,
            str(dtype).removeprefix("torch."),
            loaded_bytes(model_config(files), dtype, packed=packed),
        )
        log.info("loading %s (%s) as %s onto %s", description.id, files.path, dtype, device.name)
        model = load_model(
            files,
            dtype=dtype,
            device=device.torch_device,
            ops=ops,
            progress=progress,
            max_positions=config.max_context or None,
        )
    runner = build_runner(
        model,
        ops=ops,
        device=device,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_cache_memory=config.kv_cache_memory,
        max_num_seqs=config.max_num_seqs,
        max_tokens_per_step=config.max_tokens_per_step or _MAX_TOKENS_PER_STEP[device.torch_device.type],
        max_context=config.max_context,
        pipeline_depth=max_pipeline_depth,
        attention_backend=config.attention_backend,
        model_id=description.id,
        model_hash=description.hash,
        eos_ids=description.eos_ids,
        progress=progress,
    )
    if device.torch_device.type == "cpu":
        _take_cache(runner.cache)
        if (costs := measure_costs(runner)) is not None:
            runner.tell_costs(costs)
    return runner


def _take_cache(cache: KvCache) -> None:
    """On the host: as much of it as a short wait gives."""
    taken = take_pages(cache.data, 2 * cache.shape.num_layers, _TAKING_S)
    log.info("%d of %d bytes of the KV cache are taken; the rest is as it is used", taken, cache.data.nbytes)


def _set_early_launch(config: ExecutorConfig, device: Device) -> None:
    """Before any kernel is launched. Raises ConfigError where it was asked for and can not be had."""
    if not config.early_launch:
        return
    reason = why_no_triton()
    if device.torch_device.type != "cuda":
        reason = f"it is for GPUs, not for {device.name}"
    elif not reason and torch.cuda.get_device_capability(device.torch_device) < (9, 0):
        reason = f"{device.name} is older than capability 9.0"
    if reason:
        raise ConfigError(f"early_launch: {reason}", field="early_launch")
    from executor_svc.kernels.early import launch_early  # only now: a CPU's installation has no triton

    launch_early(True)
    log.info("kernels are launched before the one ahead of them ends")


def _check_fit(config: ExecutorConfig, files: ModelFiles, device: torch.device, kind: str, num_bytes: int) -> None:
    """Before anything is read, so that what can not be had is said and not killed for. Raises ModelTooLarge."""
    room = room_on(device)
    cache_bytes = 0 if config.num_blocks else config.kv_cache_memory
    check_weights_fit(files.description.id, kind, num_bytes, room, cache_bytes=cache_bytes)
    log.info("weights take %d of %d bytes free on %s", num_bytes, room.num_bytes, room.where)


def compute_threads(config: ExecutorConfig) -> int:
    """As configured, else the least that host, affinity and control group give. 0: torch's own choice, which knows the
    first two."""
    bound = cgroup_cpus() or 0
    return config.threads or (bound if bound < torch.get_num_threads() else 0)


def _cpu_kernels(config: ExecutorConfig, files: ModelFiles, progress: Progress) -> Library | None:
    """The kernels where this configuration takes them; None: torch computes the steps. Says which in the log.

    Raises ConfigError where weights were asked for that only the kernels have, ModelTooLarge where theirs do not fit.
    """
    reason = _why_not_kernels(config, files)
    if not reason:
        try:
            found = find_library()
            # A build takes some seconds: what does not fit should not wait for it.
            num_bytes = native_bytes(files, model_config(files), _FORMATS[config.weight_dtype])
            _check_fit(config, files, torch.device("cpu"), f"weight_dtype {config.weight_dtype}", num_bytes)
            if found is None:
                progress("building the CPU kernels", 0, 1)
            kernels = found or build_library()
        except NoKernels as error:
            reason = str(error)
        else:
            if found is None:
                progress("building the CPU kernels", 1, 1)
            how = "just built" if found is None else "found"
            log.info("steps run in the CPU kernels, for %s (%s: %s)", kernels.instructions, how, kernels.path)
            return kernels
    if config.weight_dtype in ("int8", "int4"):
        raise ConfigError(f"weight_dtype {config.weight_dtype} needs the CPU kernels: {reason}", field="weight_dtype")
    log.info("steps run in torch, not in the CPU kernels: %s", reason)
    return None


def _why_not_kernels(config: ExecutorConfig, files: ModelFiles) -> str:
    if not (config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())):
        return "they are for the CPU"
    if config.numerics != "fast":
        return f"numerics {config.numerics}"
    if config.dtype not in ("auto", "bfloat16"):
        return f"dtype {config.dtype}"
    if config.attention_backend != "auto":
        return f"attention backend {config.attention_backend}"
    return unsupported(model_config(files))
