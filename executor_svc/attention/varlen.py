"""Backend "varlen": torch's own attention over a paged cache, `torch.nn.attention.varlen.varlen_attn`.

One call takes a layer of the whole step: each row of the batch is a sequence, with one query where it decodes and with
its chunk where it does not. Queries are aligned with the end of the keys, which is what a chunk is. Lengths and block
tables are gathered by row on the device, so one graph a bucket holds for every context.

Keys are never split between programs (`num_splits=1`): with paged keys, FlashAttention 2 loses rows of a batch when it
splits (pytorch issue 194167). So few long sequences keep few multiprocessors busy; the kernels of backend "triton" do
split. FlashAttention 2 wants pages of a multiple of 256 tokens, 3 and 4 take any size.
"""

import inspect
from importlib.util import find_spec
from typing import Protocol, cast

import torch

from executor_svc.attention.base import Attend
from executor_svc.attention.layout import AttentionShape, StepLayout
from executor_svc.kv_cache import KvCache, KvShape

# Tokens of which a page has a multiple.
_PAGE = 256
_WANTED = ("seqused_k", "block_table", "num_splits")


class VarlenAttn(Protocol):
    """As torch 2.13 has it."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor: ...


def why_no_varlen() -> str:
    """Why the installed torch can not attend to a paged cache; empty: it can."""
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen; torch 2.13 has what is needed"
    from torch.nn.attention.varlen import varlen_attn

    lacking = [name for name in _WANTED if name not in inspect.signature(varlen_attn).parameters]
    if lacking:
        return f"varlen_attn of torch {torch.__version__} lacks {', '.join(lacking)}; that of torch 2.13 has them"
    return ""


def why_not_for(kv: KvShape) -> str:
    """Why it can not attend to such a cache; empty: it can. For a torch that `why_no_varlen` has nothing against."""
    if kv.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, not {str(kv.dtype).removeprefix('torch.')}"
    if kv.head_dim % 8 or kv.head_dim > 256:
        return f"it needs heads of a multiple of 8, at most 256, not {kv.head_dim}"
    if kv.block_size % _PAGE and not _other_implementation():
        return f"FlashAttention 2, which torch brings, needs block_size {_PAGE}, not {kv.block_size}"
    return ""


def _other_implementation() -> str | None:
    """Of FlashAttention, activated in this process: "FA3" or "FA4"; None: torch's own."""
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl()


def make_varlen(shape: AttentionShape) -> "VarlenAttention":
    from torch.nn.attention.varlen import varlen_attn

    # FlashAttention 3 takes no key offsets beside a block table, 2 is called with them in torch's own examples.
    return VarlenAttention(shape, cast(VarlenAttn, varlen_attn), with_key_offsets=_other_implementation() is None)


class VarlenAttention:
    """Keeps nothing between steps."""

    def __init__(self, shape: AttentionShape, attend: VarlenAttn, *, with_key_offsets: bool) -> None:
        self._shape = shape
        self._attend = attend
        self._with_key_offsets = with_key_offsets

    @property
    def name(self) -> str:
        return "varlen"

    @property
    def gathers(self) -> bool:
        return False

    def begin(self, cache: KvCache, layout: StepLayout) -> Attend:
        return _Step(self._shape, self._attend, cache, layout, self._with_key_offsets)


class _Step:
    """One step's attention over all layers. On the device, int32, of B rows: `_ends` [B + 1], of their queries; `_used`
    [B], keys of each; `_tables` [B, max_blocks]."""

    def __init__(
        self, shape: AttentionShape, attend: VarlenAttn, cache: KvCache, layout: StepLayout, with_key_offsets: bool
    ) -> None:
        self._shape = shape
        self._attend = attend
        self._cache = cache
        self._slots = layout.slots
        tables, columns, decode = layout.tables, layout.columns, layout.decode
        if columns is None:
            assert decode is not None and decode.index is None
            rows = decode.rows
            used = tables.lengths.index_select(0, rows)
            ends = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
        else:
            rows = columns.rows
            at, _, count, start = columns.columns
            used = tables.lengths.index_select(0, rows).index_copy_(0, at, start + count)
            counts = torch.ones_like(rows).index_copy_(0, at, count)
            ends = _offsets(counts)
        self._ends = ends
        self._used = used.to(torch.int32)
        self._key_ends = _offsets(used) if with_key_offsets else None
        self._tables = tables.block_tables.index_select(0, rows)
        # The host knows these; the kernel's launch depends on nothing else.
        self._max_q = max((part.count for part in layout.prefills), default=1)
        ends_at = [part.start + part.count for part in layout.prefills]
        self._max_k = max([*ends_at, *([decode.max_length] if decode is not None else [])])

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache, window = self._cache, self._shape.windows[layer]
        cache.write(layer, self._slots, k, v)
        return self._attend(
            q, cache.keys[layer], cache.values[layer], self._ends, self._key_ends, self._max_q, self._max_k,
            scale=self._shape.scale, window_size=(window - 1 if window else -1, 0), enable_gqa=True,
            seqused_k=self._used, block_table=self._tables, num_splits=1,
        )  # fmt: skip


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """int64 [B] to int32 [B + 1]: 0, then the sums so far."""
    ends = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    ends[1:].copy_(counts.cumsum(0))
    return ends
