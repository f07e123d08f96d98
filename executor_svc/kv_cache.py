"""The paged KV cache: one tensor for all layers, and how many blocks of it the memory allows."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token costs. `dtype` is the model's."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """Keys and values, [layers, 2, num_blocks + 2, block_size, kv_heads, head_dim] on the device.

    A block of one layer is contiguous, slots before heads, so that the blocks of a sequence, gathered, are a sequence.
    Two blocks lie behind those the scheduler knows. `null_block` is zero for ever: table entries without a block name
    it, so that what masked attention reads there is finite. `sink_block` takes what padding writes; nobody reads it.
    Written by the COMPUTE stream alone.
    """

    def __init__(
        self, shape: KvShape, num_blocks: int, zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self.sink_block = num_blocks + 1
        size = (shape.num_layers, 2, num_blocks + 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.data = zeros(size, shape.dtype)
        # Views made once: a layer's blocks, and the same by slot (block * block_size + offset).
        self.keys = [self.data[layer, 0] for layer in range(shape.num_layers)]
        self.values = [self.data[layer, 1] for layer in range(shape.num_layers)]
        self.key_slots = [blocks.view(-1, shape.num_kv_heads, shape.head_dim) for blocks in self.keys]
        self.value_slots = [blocks.view(-1, shape.num_kv_heads, shape.head_dim) for blocks in self.values]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """slots: int64 [T]; k, v: [T, kv_heads, head_dim]."""
        self.key_slots[layer].index_copy_(0, slots, k)
        self.value_slots[layer].index_copy_(0, slots, v)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """All sources are read before any target is written. int64 [n], targets distinct."""
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))

    def clean_slots(self, slots: torch.Tensor) -> None:
        """Zeros in every layer. slots: int64 [n], block * block_size + offset."""
        self.data.flatten(2, 3).index_fill_(2, slots, 0.0)


def cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes this process's control group may still take; None: no limit, or no control groups."""
    for limit_name, usage_name, stat_name in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            limit = int((root / limit_name).read_text())
            usage = int((root / usage_name).read_text())
        except (OSError, ValueError):  # no such group, or the limit is "max"
            continue
        if limit < 1 << 60:
            return max(0, limit - max(0, usage - _file_pages(root / stat_name)))
    return None


def _file_pages(stat: Path) -> int:
    """Bytes of files in the page cache, which count as used and are given up when memory is asked for; 0: unknown."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return 0
    found = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
    prefix = "total_" if "total_inactive_file" in found else ""
    return found.get(prefix + "inactive_file", 0) + found.get(prefix + "active_file", 0)


def host_memory() -> int:
    """Bytes the host has left for new memory, whatever a control group allows."""
    return int(psutil.virtual_memory().available)


def host_available() -> int:
    """Bytes this process may still take on the host: the least of what host and control group leave."""
    available, limited = host_memory(), cgroup_available()
    return available if limited is None else min(available, limited)


def cuda_free(device: torch.device) -> int:
    """Bytes nobody has taken of the device."""
    return torch.cuda.mem_get_info(device)[0]


def cuda_available(device: torch.device) -> int:
    """Bytes free on the device, what torch has cached and does not use included."""
    return cuda_free(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


# The part of the memory found free that the cache takes by itself. What steps and graphs take of a device's own memory
# was measured and is not in it: the rest is for wishes that no warm-up has (logprobs of prompts), for what backends
# that gather keys take for contexts longer than graphs are made for, and for what graphs take beyond the estimate.
CPU_SHARE = 0.25
CUDA_SHARE = 0.9


def plan_num_blocks(
    shape: KvShape,
    *,
    available_bytes: int,
    share: float,
    num_blocks: int = 0,
    cache_bytes: int = 0,
    useful_blocks: int,
    blocks_per_sequence: int,
    note: str = "",
) -> int:
    """How many blocks to make. Explicit `num_blocks` wins, then `cache_bytes`, else `share` of what is available.

    A measured size stops at `useful_blocks`, which the most sequences at their longest fill. Raises ConfigError when
    the wish does not fit, or when what fits holds not even one block; `note` says there why no more is available.
    """
    block = shape.block_bytes
    note = note and f" ({note})"
    if num_blocks:
        _check_fits(num_blocks, block, available_bytes, "num_blocks", note)
        return num_blocks
    if cache_bytes:
        count = cache_bytes // block
        if count < 1:
            raise ConfigError(
                f"kv_cache_memory of {cache_bytes} bytes holds no block: one takes {block} bytes",
                field="kv_cache_memory",
                limit=str(block),
            )
        _check_fits(count, block, available_bytes, "kv_cache_memory", note)
        return count
    count = min(int(available_bytes * share) // block, useful_blocks)
    if count < min(blocks_per_sequence, 2):
        raise ConfigError(
            f"{available_bytes} bytes are free and {share:.0%} of them hold {max(count, 0)} KV blocks "
            f"of {block} bytes{note}; free memory, lower block_size or set kv_cache_memory",
            field="kv_cache_memory",
            limit=str(available_bytes),
        )
    return count


def _check_fits(count: int, block: int, available: int, field: str, note: str) -> None:
    if count * block > available:
        raise ConfigError(
            f"{field} asks for {count} KV blocks, {count * block} bytes; {available} bytes are free{note}",
            field=field,
            limit=str(available),
        )
