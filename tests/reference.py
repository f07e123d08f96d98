"""What our own results are held against: transformers' models, and the plainest possible attention and products.

The default model's reference is read by transformers' own GGUF code, so nothing of ours stands between the file and it.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import gguf
import torch
import torch.nn.functional as F

from common.model_files.catalog import resolve
from common.model_files.description import ModelFiles

NEAR_TIE = 1e-3


class PlainOps:
    """Ops as PyTorch has them; fast in name and in numerics."""

    name = "fast"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class DenseAttend:
    """Attention of one whole sequence, no cache: every score is computed, those out of sight are masked."""

    def __init__(self, windows: Sequence[int]) -> None:
        self._windows = windows

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        group = num_heads // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        window = self._windows[layer]
        if window:
            visible &= ~visible.tril(-window)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def logits_of(decoder: Any, ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocab] of one of our decoders, the whole sequence at once."""
    with torch.inference_mode():
        tokens = torch.tensor(ids, device=decoder.device)
        positions = torch.arange(len(ids), device=decoder.device)
        hidden = decoder.forward(tokens, positions, DenseAttend(decoder.config.windows))
        logits: torch.Tensor = decoder.logits(hidden)
        return logits


@cache
def default_files() -> ModelFiles:
    """The default model. Tests that use it are marked `model`."""
    return resolve()


@cache
def reference_model() -> Any:
    """transformers' LlamaForCausalLM with the default model's dequantised weights, float32. Takes seconds once."""
    transformers: Any = importlib.import_module("transformers")
    gguf_reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    files = default_files()
    config = transformers.LlamaConfig(**{key: value for key, value in files.config.items() if key != "architectures"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    # It asks for the same table of names once for each module of the model, which takes longer than the reading.
    with patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        read = gguf_reader.load_gguf_checkpoint(str(files.path), return_tensors=True, model_to_load=model)
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "rope_theta", "rms_norm_eps"):
        assert read["config"][key] == files.config[key], key
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False, assign=True)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # is computed, not read
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model.float().eval()


def reference_logits(ids: Sequence[int]) -> torch.Tensor:
    """float32 [len(ids), vocab] of transformers' default model."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model()(torch.tensor([list(ids)])).logits[0].float()
        return logits


@dataclass(frozen=True)
class Difference:
    """Output token `index` is not the reference's best. `gap`: between the reference's two best logits there."""

    index: int
    token: int
    reference_token: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap < NEAR_TIE


def greedy_differences(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[Difference]:
    """Where greedy `output_ids` differ from what the reference would choose after the same tokens.

    Each position is judged on the output as it is, so one near-tie does not make all that follows a difference.
    """
    logits = reference_logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
    best = logits.topk(2, dim=-1)
    return [
        Difference(index, token, int(best.indices[index, 0]), float(best.values[index, 0] - best.values[index, 1]))
        for index, token in enumerate(output_ids)
        if token != int(best.indices[index, 0])
    ]
