"""Tiny random checkpoints: transformers' models as transformers saves them, and the same weights as GGUF files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

from tests.gguf_rows import random_rows

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# What each case is called -> (transformers' class without its ending, changes to SHAPE).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
}


def make_model(case: str, **further: Any) -> Any:
    """transformers' model of `case`, random but the same each time, weights large enough that every part matters."""
    name, changes = CASES[case]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **changes, **further})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    """As transformers saves it; `max_shard_size` cuts it into shards."""
    model.save_pretrained(directory, **options)
    return directory


def expected_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab]"""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
        return logits


_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """transformers' parameter name → GGUF's."""
    module, _, kind = name.rpartition(".")
    if module in _GLOBAL:
        return f"{_GLOBAL[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{kind}"


def interleave(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order of q's and k's rows in GGUF files of the llama architecture: the halves of a head alternate."""
    half = array.shape[0] // heads // 2
    rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return array[rows]


def _quantised(array: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    try:
        return quantize(array, kind)
    except NotImplementedError:
        return random_rows(kind, *array.shape, least=0.1, most=0.5)


def write_gguf(
    model: Any,
    path: Path,
    quantisation: GGMLQuantizationType | Callable[[str], GGMLQuantizationType] = GGMLQuantizationType.F32,
    extra: Callable[[GGUFWriter], None] = lambda writer: None,
    **split: Any,
) -> Path:
    """Writes `model` as a converter would and, for a lossy type, gives the model the weights the file then holds.

    `quantisation`: of all matrices, or of each by its name in the file. Rows that the library can not make are random.
    `split`: as GGUFWriter has it (split_max_tensors, small_first_shard); then `path`'s parts are written.
    """
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    rope = config.rope_parameters
    writer = GGUFWriter(path, arch, **split)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _add_rope(writer, rope, head_dim)
    extra(writer)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        raw = tensor.numpy()
        kind = GGMLQuantizationType.F32
        if raw.ndim == 2:
            kind = quantisation(gguf_name(name)) if callable(quantisation) else quantisation
        if kind != GGMLQuantizationType.F32:
            raw = _quantised(raw, kind)
            tensor.copy_(torch.from_numpy(dequantize(raw, kind).astype(np.float32)))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
        if heads and arch == "llama":
            raw = interleave(raw, heads)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope(writer: GGUFWriter, rope: dict[str, Any], head_dim: int) -> None:
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", rope["rope_type"])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        # Converters write what the frequencies are to be divided by; see Llama 3.1's scaling.
        frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / (keep + (1 - keep) / factor)).astype(np.float32))
