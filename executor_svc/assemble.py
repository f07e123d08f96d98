"""From configuration to a Runner with its model loaded. Imports torch, so it is imported late and in the loader's
thread: the port answers meanwhile."""

import logging

import torch

from common.model_files.description import ModelFiles, Progress
from executor_svc.build import build_runner, default_dtype, make_device, make_ops
from executor_svc.config import ExecutorConfig
from executor_svc.loader.load import load_model, model_dtype
from executor_svc.runner import Runner

log = logging.getLogger(__name__)

# A chunk is what running sequences wait for: on a CPU half a second at 512 tokens of a 135M model.
_MAX_TOKENS_PER_STEP = {"cpu": 512, "cuda": 2048}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_executor(config: ExecutorConfig, files: ModelFiles, max_pipeline_depth: int, progress: Progress) -> Runner:
    """Blocks for as long as loading takes. Raises ConfigError and ModelError."""
    description = files.description
    device = make_device(config.device, threads=config.threads)
    dtype = _DTYPES.get(config.dtype) or default_dtype(config.numerics, device.torch_device.type) or model_dtype(files)
    ops = make_ops(config.numerics, device.torch_device)
    log.info("loading %s (%s) as %s onto %s", description.id, files.path, dtype, device.name)
    model = load_model(
        files,
        dtype=dtype,
        device=device.torch_device,
        ops=ops,
        progress=progress,
        max_positions=config.max_context or None,
    )
    return build_runner(
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
