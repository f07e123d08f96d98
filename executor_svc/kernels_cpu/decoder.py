"""A decoder whose whole step is one call of the CPU kernels, and the attention backend that belongs to it."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from executor_svc.attention.base import Attend
from executor_svc.attention.layout import StepLayout
from executor_svc.buffers import RowState
from executor_svc.host_memory import Arena
from executor_svc.kernels_cpu.library import CBatch, CChunk, CLayer, CMatrix, CModel, CRows, CShape, CStep, Library
from executor_svc.kernels_cpu.packing import Blocks, Format, Packed, pack
from executor_svc.kv_cache import KvCache
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import DecoderWeights
from executor_svc.models.rope import RotaryTable
from executor_svc.step_inputs import StepInputs

# The pieces a field of LayerWeights (or, for layer -1, of DecoderWeights) is made of, in order; none: it has no such
# field.
ReadField = Callable[[int, str], Sequence[torch.Tensor | Blocks]]

_DEPTH = 32


def unsupported(config: ModelConfig) -> str:
    """Why the kernels can not compute this model; empty: they can."""
    wide = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
            "head_dim": config.head_dim}  # fmt: skip
    odd = [f"{name} {value}" for name, value in wide.items() if value % _DEPTH]
    return f"{', '.join(odd)}: not a multiple of {_DEPTH}" if odd else ""


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """Norms are float32."""

    qkv: Packed
    output: Packed
    gate_up: Packed
    down: Packed
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeights:
    """embedding: bfloat16 [vocab, hidden]; head: of its own even where the model ties them."""

    embedding: torch.Tensor
    layers: tuple[NativeLayer, ...]
    final_norm: torch.Tensor
    head: Packed
    rope_divisors: torch.Tensor | None = None

    @property
    def step_bytes(self) -> int:
        """What one step reads of the weights, the rows of the embedding left out."""
        return self.head.num_bytes + sum(
            matrix.num_bytes for layer in self.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )

    @property
    def formats(self) -> str:
        """For people: "int4, head int8"."""
        inner = sorted({Format(m.format).name.lower() for lay in self.layers for m in (lay.qkv, lay.gate_up, lay.down)})
        head = Format(self.head.format).name.lower()
        return "+".join(inner) if inner == [head] else f"{'+'.join(inner)}, head {head}"


def pack_weights(config: ModelConfig, read: ReadField, wanted: Format | None) -> NativeWeights:
    """`wanted`: the format of every matrix; None: blocks stay as they are, the rest becomes bfloat16."""
    arena = Arena()

    def vector(layer: int, field: str) -> torch.Tensor | None:
        found = [piece.float() for piece in read(layer, field) if isinstance(piece, torch.Tensor)]
        return torch.cat(found).contiguous() if found else None

    def needed(layer: int, field: str) -> torch.Tensor:
        found = vector(layer, field)
        assert found is not None
        return found

    def matrix(layer: int, field: str) -> Packed:
        return pack(
            read(layer, field), wanted, bias=vector(layer, field + "_bias"), gated=field == "gate_up", arena=arena
        )

    layers = tuple(
        NativeLayer(
            qkv=matrix(layer, "qkv"),
            output=matrix(layer, "output"),
            gate_up=matrix(layer, "gate_up"),
            down=matrix(layer, "down"),
            input_norm=needed(layer, "input_norm"),
            post_norm=needed(layer, "post_norm"),
            q_norm=vector(layer, "q_norm"),
            k_norm=vector(layer, "k_norm"),
        )
        for layer in range(config.num_layers)
    )
    (embedding,) = read(-1, "embedding")
    head = pack(read(-1, "head") or (embedding,), wanted, arena=arena)
    if isinstance(embedding, Blocks):
        embedding = torch.from_numpy(embedding.values())
    return NativeWeights(embedding.to(torch.bfloat16).contiguous(), layers, needed(-1, "final_norm"), head)


def pack_decoder(config: ModelConfig, weights: DecoderWeights, wanted: Format | None) -> NativeWeights:
    """From a decoder's weights, which may be freed afterwards."""

    def read(layer: int, field: str) -> Sequence[torch.Tensor]:
        tensor = getattr(weights if layer < 0 else weights.layers[layer], field, None)
        return () if tensor is None else (tensor,)

    return pack_weights(config, read, wanted)


class NativeDecoder:
    """A Model (executor_svc.step_model). Works with the first cache it meets and with NativeAttention alone."""

    def __init__(
        self,
        config: ModelConfig,
        weights: NativeWeights,
        library: Library,
        *,
        threads: int,
        cpus: Sequence[int] = (),
        max_positions: int = 0,
    ) -> None:
        """`threads`: that share a step, the caller's included. `cpus`: the processors they keep to, one each, the
        caller's first, which it sees to itself; empty: none does. Raises MemoryError."""
        self.config = config
        self.weights = weights
        self.dtype = torch.bfloat16
        self.device = torch.device("cpu")
        self.library = library
        self.threads = threads
        self._cpus = tuple(cpus)
        table = RotaryTable(
            config.rope,
            config.head_dim,
            min(max_positions or config.max_positions, config.max_positions),
            dtype=torch.float32,
            device=self.device,
            divisors=weights.rope_divisors,
        )
        self._rotary = table
        self._cache: KvCache | None = None
        self._handle = 0
        self._kept: list[object] = []

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """See Decoder.forward; `attend` comes from NativeAttention. Returns bfloat16 [T, hidden]."""
        if not isinstance(attend, NativeStep):
            raise TypeError("the native decoder needs its own attention")
        self._bind(attend.cache)
        out = torch.empty(token_ids.shape[0], self.config.hidden_size, dtype=torch.bfloat16)
        self.library.forward(self._handle, attend.describe(token_ids.contiguous(), positions.contiguous(), out))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: bfloat16 [N, hidden] from `forward`. Returns float32 [N, vocab]."""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self.config.vocab_size, dtype=torch.float32)
        self.library.logits(self._handle, hidden.data_ptr(), hidden.shape[0], out.data_ptr())
        return out

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See GreedyModel."""
        hidden = hidden.contiguous()
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64)
        is_finite = torch.empty(hidden.shape[0], dtype=torch.bool)
        self.library.greedy(self._handle, hidden.data_ptr(), hidden.shape[0], tokens.data_ptr(), is_finite.data_ptr())
        return tokens, is_finite

    def run_greedy(self, inputs: StepInputs, state: RowState, cache: KvCache, slot: torch.Tensor) -> None:
        """See WholeStepModel."""
        self._bind(cache)
        rows = CRows(
            state.length.data_ptr(), state.last_token.data_ptr(), state.dead.data_ptr(), state.block_tables.data_ptr(),
            state.block_tables.shape[1], state.pad_row, cache.sink_block,
        )  # fmt: skip
        num_rows = inputs.rows.shape[0]
        sampling, decoding, columns = inputs.sampling, inputs.decode_at, inputs.chunk_columns
        batch = CBatch(
            rows=inputs.rows.data_ptr(),
            token_at=_address(inputs.token_at),
            token_ids=_address(inputs.token_ids),
            positions=_address(inputs.positions),
            last_at=_address(inputs.last_at),
            sampling=_address(sampling),
            decode_tokens=_address(inputs.decode_tokens),
            decode_at=_address(decoding),
            chunks=_address(columns),
            num_rows=num_rows,
            num_tokens=num_rows if inputs.token_at is None else inputs.token_at.shape[0],
            num_decodes=0 if decoding is None else decoding.shape[0],
            num_chunks=0 if columns is None else columns.shape[1],
            num_sampling=(num_rows if sampling is None else sampling.shape[0]) if inputs.samples_any else 0,
            tokens=slot[0].data_ptr(),
            status=slot[1].data_ptr(),
        )
        self.library.run(self._handle, rows, batch)

    def spent(self) -> dict[str, int]:
        """Ticks of the time stamp counter by part of a step, since the last call."""
        return self.library.spent(self._handle)

    def _bind(self, cache: KvCache) -> None:
        if self._cache is cache:
            return
        if self._cache is not None:
            raise RuntimeError("a native decoder serves one cache")
        if cache.shape.dtype is not torch.bfloat16:
            raise TypeError(f"the kernels keep keys and values in bfloat16, not {cache.shape.dtype}")
        self._cache = cache
        self._handle = self.library.create(self._describe(cache), self.threads, self._cpus)
        weakref.finalize(self, self.library.destroy, self._handle)

    def _describe(self, cache: KvCache) -> CModel:
        config, weights = self.config, self.weights
        layers = (CLayer * config.num_layers)()
        for index, layer in enumerate(weights.layers):
            layers[index] = CLayer(
                *(_matrix(m) for m in (layer.qkv, layer.output, layer.gate_up, layer.down)),
                _address(layer.input_norm), _address(layer.post_norm), _address(layer.q_norm), _address(layer.k_norm),
                _address(cache.keys[index]), _address(cache.values[index]), config.windows[index],
            )  # fmt: skip
        shape = CShape(
            config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.intermediate_size, config.vocab_size, cache.shape.block_size, cache.null_block,
            config.rms_norm_eps, config.head_dim**-0.5,
        )  # fmt: skip
        return CModel(
            shape,
            layers,
            _matrix(weights.head),
            _address(weights.final_norm),
            _address(self._rotary.table),
            _address(weights.embedding),
        )


class NativeAttention:
    """The AttentionBackend of a NativeDecoder: hands the step's layout through."""

    @property
    def name(self) -> str:
        return "native"

    @property
    def gathers(self) -> bool:
        return False

    def begin(self, cache: KvCache, layout: StepLayout) -> "NativeStep":
        return NativeStep(cache, layout)


class NativeStep:
    """One step's layout in the kernels' terms. Never called layer by layer."""

    def __init__(self, cache: KvCache, layout: StepLayout) -> None:
        self.cache = cache
        self._layout = layout
        self._kept: list[torch.Tensor] = []

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise TypeError("the native attention works within the native decoder's step alone")

    def describe(self, token_ids: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> CStep:
        """Addresses of int64 tensors, which live as long as this object does; `out` is the caller's."""
        layout = self._layout
        step = CStep(
            token_ids=self._hold(token_ids),
            positions=self._hold(positions),
            slots=self._hold(layout.slots),
            block_tables=self._hold(layout.tables.block_tables),
            lengths=self._hold(layout.tables.lengths),
            table_size=layout.tables.block_tables.shape[1],
            num_tokens=token_ids.shape[0],
            out=out.data_ptr(),
        )
        if layout.decode is not None:
            part = layout.decode
            step.decode_rows = self._hold(part.rows)
            step.decode_index = None if part.index is None else self._hold(part.index)
            step.num_decodes = part.rows.shape[0]
        if layout.prefills:
            chunks = (CChunk * len(layout.prefills))()
            for at, chunk in enumerate(layout.prefills):
                chunks[at] = CChunk(self._hold(chunk.row), chunk.first, chunk.count, chunk.start)
            step.chunks = chunks
            step.num_chunks = len(chunks)
        return step

    def _hold(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _matrix(packed: Packed) -> CMatrix:
    return CMatrix(_address(packed.data), _address(packed.bias), packed.format, packed.columns, packed.depth)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
