"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one forward pass, steered by ModelConfig."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from executor_svc.attention.base import Attend
from executor_svc.models.config import ModelConfig
from executor_svc.models.rope import RotaryTable, rotate
from executor_svc.ops import Ops

# Elements below which PyTorch's CPU kernels run in one thread (its GRAIN_SIZE is 32768).
_SERIAL_ELEMENTS = 32767


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
        self._serial_activation = ops.name == "exact" and self.device.type == "cpu"

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """token_ids, positions: int64 [T] on the device, each in range (padding too: use 0).

        Returns hidden states [T, hidden], final norm applied. q, k and v reach `attend` as views whose last dimension
        is contiguous; the first dimension's stride may be larger than the row.
        """
        config, ops = self.config, self._ops
        num_tokens = token_ids.shape[0]
        hidden = self.weights.embedding.index_select(0, token_ids)
        cos, sin = self._rotary.gather(positions)
        for index, layer in enumerate(self.weights.layers):
            normed = ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            q, k, v = self._project(layer, normed, cos, sin)
            context = attend(index, q, k, v).reshape(num_tokens, config.num_heads * config.head_dim)
            hidden = hidden + ops.linear(context, layer.output, layer.output_bias)
            normed = ops.rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
            gated = self._gate(ops.linear(normed, layer.gate_up, layer.gate_up_bias))
            hidden = hidden + ops.linear(gated, layer.down, layer.down_bias)
        return ops.rms_norm(hidden, self.weights.final_norm, config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden] from `forward`. Returns float32 [N, vocab]."""
        return self._ops.linear(hidden, self.weights.head).float()

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        num_q, num_kv = config.num_heads, config.num_kv_heads
        qkv = self._ops.linear(x, layer.qkv, layer.qkv_bias).view(-1, num_q + 2 * num_kv, config.head_dim)
        v = qkv[:, num_q + num_kv :]
        if layer.q_norm is None or layer.k_norm is None:
            rotated = rotate(qkv[:, : num_q + num_kv], cos, sin)
            return rotated[:, :num_q], rotated[:, num_q:], v
        q = self._norm_heads(qkv[:, :num_q], layer.q_norm)
        k = self._norm_heads(qkv[:, num_q : num_q + num_kv], layer.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self._ops.rms_norm(flat, weight, self.config.rms_norm_eps).view(x.shape)

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [T, 2 intermediate]. Returns silu(gate) * up, [T, intermediate]."""
        width = self.config.intermediate_size
        gate, up = gate_up[:, :width], gate_up[:, width:]
        rows = max(1, _SERIAL_ELEMENTS // width)
        if not self._serial_activation or gate.shape[0] <= rows:
            return F.silu(gate).mul_(up)
        # PyTorch's CPU kernel computes exp() differently in vector body and scalar tail, and where it splits work
        # between threads a tail begins anywhere. In pieces that stay in one thread, tails lie at fixed columns.
        return torch.cat([F.silu(piece) for piece in torch.split(gate, rows)]).mul_(up)
