"""Whether a model's weights fit into the memory that is there: asked before any of them is read."""

from dataclasses import dataclass
from math import prod

import torch

from common.errors import ModelTooLarge
from common.model_files.description import ModelFiles
from executor_svc.kernels_cpu.packing import BITS, PANEL, Format, common_format
from executor_svc.kv_cache import cgroup_available, cuda_available, host_memory
from executor_svc.loader.gguf_blocks import format_of
from executor_svc.loader.names import EMBEDDING, HEAD, Part, parts
from executor_svc.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may still be taken, and of what."""

    num_bytes: int
    where: str


def room_on(device: torch.device) -> Room:
    """On the CPU the least of what the host and this process's control group leave."""
    if device.type != "cpu":
        return Room(cuda_available(device), str(device))
    host, group = host_memory(), cgroup_available()
    return Room(host, "the host") if group is None or host <= group else Room(group, "the control group")


def loaded_bytes(config: ModelConfig, dtype: torch.dtype, *, packed: bool) -> int:
    """What torch holds. `packed`: matrices twice, because oneDNN multiplies from an order of its own."""
    once = sum(prod(part.shape) for part in parts(config))
    again = sum(prod(part.shape) for part in parts(config) if len(part.shape) == 2 and part.field != EMBEDDING)
    if config.tie_embeddings:
        again += config.vocab_size * config.hidden_size
    return (once + (again if packed else 0)) * dtype.itemsize


def native_bytes(files: ModelFiles, config: ModelConfig, wanted: Format | None) -> int:
    """What the CPU kernels hold: matrices packed, the embedding in bfloat16 beside its packed copy, float32 norms."""
    matrices: dict[tuple[int, str], list[Part]] = {}
    total = 2 * config.vocab_size * config.hidden_size
    for part in parts(config):
        if len(part.shape) == 1:
            total += 4 * part.shape[0]
        else:
            field = HEAD if part.field == EMBEDDING and config.tie_embeddings else part.field
            matrices.setdefault((part.layer, field), []).append(part)
    for (_, field), pieces in matrices.items():
        if field == EMBEDDING:
            continue  # counted above, and never multiplied with
        kinds = {_format(files, part) for part in pieces}
        target = common_format(kinds) if wanted is None else wanted
        rows, depth = sum(part.shape[0] for part in pieces), pieces[0].shape[1]
        total += int((rows + -rows % PANEL) * depth * BITS[target] / 8)
    return total


def _format(files: ModelFiles, part: Part) -> Format:
    info = files.gguf.tensors.get(part.gguf_name) if files.gguf is not None else None
    return Format.DENSE if info is None else format_of(info.type)


def check_weights_fit(model: str, kind: str, num_bytes: int, room: Room, *, cache_bytes: int = 0) -> None:
    """`kind`: the precision, for people. `cache_bytes`: asked for the KV cache; 0: it takes what is left.

    Raises ModelTooLarge.
    """
    if num_bytes + cache_bytes <= room.num_bytes:
        return
    cache = f", and kv_cache_memory asks for {cache_bytes} bytes" if cache_bytes else ""
    raise ModelTooLarge(
        f"{model} does not fit: its weights take {num_bytes} bytes ({kind}){cache}; {room.where} has {room.num_bytes} "
        f"bytes free: {num_bytes + cache_bytes - room.num_bytes} too few. Free memory, or choose a smaller model"
        f"{', precision or cache' if cache_bytes else ' or precision'}",
        field="model",
        limit=str(room.num_bytes),
    )
