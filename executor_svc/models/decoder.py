"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one forward pass, steered by ModelConfig."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor_svc.attention.base import Attend, FusedAttend
from executor_svc.models.config import ModelConfig
from executor_svc.models.rope import RotaryTable, rotate
from executor_svc.ops import Ops


@dataclass(slots=True, eq=False)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix, rows in the order their name gives.

    qkv: [(num_heads + 2 num_kv_heads) * head_dim, hidden]; output: [hidden, num_heads * head_dim];
    gate_up: [2 intermediate, hidden]; down: [hidden, intermediate]; norms: [hidden], q_norm and k_norm: [head_dim].
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class DecoderWeights:
    """All on one device in one dtype. embedding, head: [vocab, hidden], one tensor where they are tied."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor
    # float32 [head_dim // 2] or None; see RotaryTable.
    rope_divisors: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device, shared storage counted once."""
        tensors = {t.data_ptr(): t for t in (self.embedding, self.final_norm, self.head)}
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[tensor.data_ptr()] = tensor
        return sum(t.numel() * t.element_size() for t in tensors.values())


# Attention of one layer from its projection [T, heads + 2 kv_heads, head_dim]. Returns [T, heads, head_dim].
_Mix = Callable[[int, LayerWeights, torch.Tensor], torch.Tensor]


class Decoder:
    """Stateless but for its weights: same inputs, same outputs. The caller holds torch.inference_mode()."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: Ops, *, max_positions: int | None = None
    ) -> None:
        """`max_positions`: positions the rotary table covers; default: all of the model's."""
        self.config = config
        self.weights = weights
        self.dtype: torch.dtype = weights.embedding.dtype
        self.device: torch.device = weights.embedding.device
        self._ops = ops
        self._rotary = RotaryTable(
            config.rope,
            config.head_dim,
            min(max_positions or config.max_positions, config.max_positions),
            dtype=self.dtype,
            device=self.device,
            divisors=weights.rope_divisors,
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """token_ids, positions: int64 [T] on the device, each in range (padding too: use 0).

        Returns hidden states [T, hidden], final norm applied. q, k and v reach `attend` as views whose last dimension
        is contiguous; the first dimension's stride may be larger than the row.
        """
        config, ops = self.config, self._ops
        num_tokens = token_ids.shape[0]
        hidden = self.weights.embedding.index_select(0, token_ids)
        mix = self._fused(positions, attend) if isinstance(attend, FusedAttend) else self._plain(positions, attend)
        layers, eps = self.weights.layers, config.rms_norm_eps
        normed = ops.rms_norm(hidden, layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in layers[1:]), self.weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
            context = mix(index, layer, qkv.view(num_tokens, -1, config.head_dim)).reshape(num_tokens, -1)
            normed, hidden = ops.add_rms_norm(
                ops.linear(context, layer.output, layer.output_bias), hidden, layer.post_norm, eps
            )
            gated = ops.silu_mul(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
            normed, hidden = ops.add_rms_norm(ops.linear(gated, layer.down, layer.down_bias), hidden, next_norm, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden] from `forward`. Returns float32 [N, vocab]."""
        return self.narrow_logits(hidden).float()

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `logits`, in the model's dtype: what the last product makes."""
        return self._ops.linear(hidden, self.weights.head)

    def _fused(self, positions: torch.Tensor, attend: FusedAttend) -> _Mix:
        """Norms of heads, rotation and attention are the backend's."""
        table, eps = self._rotary.table, self.config.rms_norm_eps

        def mix(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
            return attend.attend_projected(index, qkv, positions, table, norms, eps)

        return mix

    def _plain(self, positions: torch.Tensor, attend: Attend) -> _Mix:
        num_q, num_kv = self.config.num_heads, self.config.num_kv_heads
        cos, sin = self._rotary.gather(positions)

        def mix(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            v = qkv[:, num_q + num_kv :]
            if layer.q_norm is None or layer.k_norm is None:
                rotated = rotate(qkv[:, : num_q + num_kv], cos, sin)
                return attend(index, rotated[:, :num_q], rotated[:, num_q:], v)
            q = self._norm_heads(qkv[:, :num_q], layer.q_norm)
            k = self._norm_heads(qkv[:, num_q : num_q + num_kv], layer.k_norm)
            return attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)

        return mix

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self._ops.rms_norm(flat, weight, self.config.rms_norm_eps).view(x.shape)
