"""A small decoder computed twice: by torch in float32 and by the CPU kernels, over the same blocks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from executor_svc.attention.layout import (
    AttentionBackend,
    AttentionShape,
    DecodePart,
    PrefillPart,
    RowTables,
    StepLayout,
)
from executor_svc.attention.torch_paged import TorchPagedAttention
from executor_svc.kernels_cpu.compile import Level, NoKernels, own_level
from executor_svc.kernels_cpu.decoder import NativeAttention, NativeDecoder, NativeWeights, pack_weights
from executor_svc.kernels_cpu.library import Library, load_library
from executor_svc.kernels_cpu.packing import Blocks, Format
from executor_svc.kv_cache import KvCache, KvShape
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder, DecoderWeights, LayerWeights
from executor_svc.numerics import FastOps
from executor_svc.step_model import Model
from tests.gguf_rows import quantised
from tests.random_model import random_weights

CPU = torch.device("cpu")
NUM_BLOCKS = 192


def kernels() -> Library:
    """Skips where this machine can not build or run them."""
    try:
        return load_library()
    except NoKernels as error:
        pytest.skip(str(error))


def kernels_level() -> Level:
    """The one whose kernels this machine has. Skips as `kernels` does."""
    kernels()
    return own_level()


def put_foreign(path: Path) -> None:
    """A library that is whole, but that this system can not load."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"of another system" + hashlib.sha256(b"of another system").digest())


@dataclass(frozen=True)
class Case:
    """What a model may have that the kernels must know of."""

    hidden: int = 96
    intermediate: int = 160
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    extras: bool = False  # biases everywhere and norms of q and k
    window: int = 0
    block_size: int = 16
    format: Format = Format.DENSE

    @classmethod
    def of(cls, format_: Format) -> "Case":
        if format_ in (Format.INT4_K, Format.INT5_K, Format.INT6_K):  # come in 256 weights of a row
            return cls(256, 256, heads=4, kv_heads=2, format=format_)
        return cls(format=format_)

    def config(self) -> ModelConfig:
        return ModelConfig(
            "llama", 500, self.hidden, self.intermediate, 3, self.heads, self.kv_heads, self.head_dim, 1024,
            (0, self.window, 0), qkv_bias=self.extras, output_bias=self.extras, mlp_bias=self.extras,
            qk_norm=self.extras,
        )  # fmt: skip

    def weights(self) -> tuple[DecoderWeights, NativeWeights]:
        """For torch and for the kernels. Torch's are what the format says: both multiply with the same numbers."""
        weights = random_weights(self.config(), scale=0.1)

        def read(layer: int, field: str) -> Sequence[torch.Tensor | Blocks]:
            owner: DecoderWeights | LayerWeights = weights if layer < 0 else weights.layers[layer]
            tensor = getattr(owner, field, None)
            if tensor is None or tensor.dim() != 2 or field == "embedding" or self.format is Format.DENSE:
                return () if tensor is None else (tensor,)
            blocks = quantised(tensor.numpy(), self.format)
            setattr(owner, field, torch.from_numpy(blocks.values()))
            return (blocks,)

        packed = pack_weights(self.config(), read, None)
        weights.embedding = weights.embedding.bfloat16().float()
        if self.format is Format.DENSE:
            weights.head = weights.head.bfloat16().float()
            for layer in weights.layers:
                for name in LayerWeights.__slots__:
                    tensor = getattr(layer, name)
                    setattr(layer, name, None if tensor is None else tensor.bfloat16().float())
        return weights, packed


@dataclass
class Side:
    """One way to compute: a model, its attention, a cache of its own."""

    model: Model
    backend: AttentionBackend
    cache: KvCache

    def step(self, work: "Sequence[Work]", tables: torch.Tensor) -> torch.Tensor:
        """Logits of every token of the step, float32."""
        size = self.cache.shape.block_size
        ids, slots, positions, prefills, rows, index = [], [], [], [], [], []
        first = 0
        for own in work:
            at = torch.arange(own.start, own.start + len(own.ids))
            ids += own.ids
            positions.append(at)
            slots.append(tables[own.row][at // size] * size + at % size)
            if own.decodes:
                rows.append(own)
                index.append(first)
            else:
                prefills.append(PrefillPart(first, len(own.ids), own.start, torch.tensor([own.row])))
            first += len(own.ids)
        decode = None
        lengths = torch.ones(len(tables), dtype=torch.int64)
        if rows:
            which = torch.tensor([own.row for own in rows])
            lengths[which] = torch.tensor([own.start + 1 for own in rows])
            decode = DecodePart(torch.tensor(index) if prefills else None, which, int(lengths.max()))
        with torch.inference_mode():
            state = RowTables(tables, lengths, size)
            layout = StepLayout(torch.cat(slots), state, decode, tuple(prefills), None)
            attend = self.backend.begin(self.cache, layout)
            hidden = self.model.forward(torch.tensor(ids), torch.cat(positions), attend)
            return self.model.logits(hidden).float()


@dataclass
class Work:
    """Tokens of one row in one step, from position `start`."""

    row: int
    start: int
    ids: list[int]
    decodes: bool = False


@dataclass
class Scene:
    case: Case
    threads: int = 2
    cpus: tuple[int, ...] = ()
    torch_side: Side = field(init=False)
    native_side: Side = field(init=False)
    tables: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        case, config = self.case, self.case.config()
        weights, packed = case.weights()
        shape = AttentionShape(case.heads, case.kv_heads, case.head_dim, config.windows)
        self.torch_side = Side(
            Decoder(config, weights, FastOps()), TorchPagedAttention(shape), self._cache(torch.float32)
        )
        native = NativeDecoder(config, packed, kernels(), threads=self.threads, cpus=self.cpus)
        self.native_side = Side(native, NativeAttention(), self._cache(torch.bfloat16))
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5))
        self.tables = order.view(3, -1).to(torch.int32)

    def _cache(self, dtype: torch.dtype) -> KvCache:
        case = self.case
        shape = KvShape(3, case.kv_heads, case.head_dim, case.block_size, dtype)
        # Stale slots hold large numbers: nothing that is not seen may count.
        cache = KvCache(shape, NUM_BLOCKS, lambda size, dtype: torch.full(size, 50.0, dtype=dtype))
        cache.data[:, :, cache.null_block] = 0
        return cache


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())
