"""GGUF metadata in the form of Hugging Face's config.json, so that one reader serves both."""

from collections.abc import Mapping
from typing import Any

from common.errors import ModelError
from common.model_files.description import SamplingDefaults
from common.model_files.gguf_model import GgufModel

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CONTROL = 3
# Spellings of tokens that end a turn, for files made before tokenizer.ggml.eot_token_id existed.
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>"})


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """config.json's keys. Values are taken as they stand; the consumer checks types. Raises ModelError."""
    get = model.metadata.get
    arch = get("general.architecture")
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{model.path}: architecture {arch} is not supported; supported in GGUF are {known}")
    if get(f"{arch}.expert_count"):
        raise ModelError(f"{model.path}: mixture-of-experts models are not supported")
    heads = get(f"{arch}.attention.head_count")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": _vocab_size(model, arch),
        "hidden_size": get(f"{arch}.embedding_length"),
        "intermediate_size": get(f"{arch}.feed_forward_length"),
        "num_hidden_layers": get(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get(f"{arch}.attention.head_count_kv", heads),
        "max_position_embeddings": get(f"{arch}.context_length"),
        "rms_norm_eps": get(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_theta": get(f"{arch}.rope.freq_base", 10000.0),
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
    }
    head_dim = get(f"{arch}.attention.key_length", get(f"{arch}.rope.dimension_count"))
    if head_dim is not None:
        config["head_dim"] = head_dim
        if get(f"{arch}.attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{model.path}: key_length and value_length differ, which is not supported")
        if get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{model.path}: rotary embedding of a part of the head is not supported")
    window = get(f"{arch}.attention.sliding_window")
    if window and arch == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    scaling = _rope_scaling(model, arch)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _vocab_size(model: GgufModel, arch: str) -> Any:
    """Rows of the embedding: a vocabulary may be padded, and that is what token ids are checked against."""
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{model.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rope_scaling(model: GgufModel, arch: str) -> dict[str, Any] | None:
    """llama3 scaling is not here: GGUF carries it as the tensor rope_freqs.weight, which the loader applies."""
    get = model.metadata.get
    kind = get(f"{arch}.rope.scaling.type")
    factor = get(f"{arch}.rope.scaling.factor", get(f"{arch}.rope.scale_linear"))
    if kind in (None, "none") and not factor:
        return None
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    scaling = {"rope_type": kind, "factor": factor}
    names = {
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    for key, name in names.items():
        value = get(f"{arch}.rope.scaling.{name}")
        if value is not None:
            scaling[key] = value
    return scaling


def gguf_eos_ids(model: GgufModel, vocab_size: int) -> tuple[int, ...]:
    """Ends of text, turn and message, ascending."""
    get = model.metadata.get
    ids = {get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    if get("tokenizer.ggml.eot_token_id") is None:
        tokens, kinds = get("tokenizer.ggml.tokens", []), get("tokenizer.ggml.token_type", [])
        ids |= {i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if _ends_turn(text, kind)}
    return tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size))


def _ends_turn(text: str, kind: int) -> bool:
    return kind == _CONTROL and text in _END_OF_TURN


def gguf_bos_id(metadata: Mapping[str, Any]) -> int | None:
    """The token a text begins with, whether or not it is added by itself."""
    value = metadata.get("tokenizer.ggml.bos_token_id")
    return value if isinstance(value, int) else None


def gguf_sampling(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """What newer converters carry over from generation_config.json."""
    get = metadata.get
    return SamplingDefaults(
        temperature=get("general.sampling.temp"),
        top_k=get("general.sampling.top_k"),
        top_p=get("general.sampling.top_p"),
        min_p=get("general.sampling.min_p"),
        repetition_penalty=get("general.sampling.penalty_repeat"),
    )
