"""GGUF metadata in the form of Hugging Face's config.json, so that one reader serves both."""

import math
from collections.abc import Mapping
from typing import Any

from common.errors import ModelError
from common.model_files.description import SamplingDefaults
from common.model_files.gguf_model import GgufModel
from common.model_files.gguf_values import GgufValues

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CONTROL, _USER_DEFINED = 3, 4
# Spellings of tokens that end a text, a turn or a message: files name one or two of those a model was trained with.
_ENDS = frozenset(
    {
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<|eot_id|>", "<|im_end|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"),
    }
)


def gguf_config(model: GgufModel) -> dict[str, Any]:
    """config.json's keys. Whole numbers are checked here; of the rest the consumer checks types. Raises ModelError."""
    values, get = GgufValues(model.metadata, model.path), model.metadata.get
    arch = _architecture(model, values)

    def whole(key: str, default: int | None = None) -> int | None:
        return values.whole(f"{arch}.{key}", default)

    if whole("context_length") is None:
        raise ModelError(f"{model.path}: {arch}.context_length is missing")
    heads, layers = whole("attention.head_count"), whole("block_count")
    if layers is not None and layers > len(model.tensors):
        raise ModelError(f"{model.path}: {arch}.block_count is {layers}, there are {len(model.tensors)} tensors")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": _vocab_size(model, arch),
        "hidden_size": whole("embedding_length"),
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": get(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_theta": get(f"{arch}.rope.freq_base", 10000.0),
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
    }
    head_dim = whole("attention.key_length", whole("rope.dimension_count"))
    if head_dim is None and heads and config["hidden_size"]:
        head_dim = config["hidden_size"] // heads
    if head_dim is not None:
        config["head_dim"] = head_dim
        if whole("attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{model.path}: key_length and value_length differ, which is not supported")
        if whole("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{model.path}: rotary embedding of a part of the head is not supported")
    if not values.flag(f"{arch}.attention.causal", True):
        raise ModelError(f"{model.path}: attention to later tokens ({arch}.attention.causal) is not supported")
    window = whole("attention.sliding_window", 0)
    if window and arch == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    scaling = _rope_scaling(model, values, arch)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _architecture(model: GgufModel, values: GgufValues) -> str:
    arch, kind = values.text("general.architecture"), values.text("general.type", "model")
    if kind != "model":
        raise ModelError(f"{model.path}: general.type is {kind!r}: not a model by itself")
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{model.path}: architecture {arch} is not supported; supported in GGUF are {known}")
    if values.whole(f"{arch}.expert_count", 0):
        raise ModelError(f"{model.path}: mixture-of-experts models are not supported")
    return arch


def _vocab_size(model: GgufModel, arch: str) -> Any:
    """Rows of the embedding: a vocabulary may be padded, and that is what token ids are checked against."""
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{model.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rope_scaling(model: GgufModel, values: GgufValues, arch: str) -> dict[str, Any] | None:
    """llama3 scaling is not here: GGUF carries it as the tensor rope_freqs.weight, which the loader applies."""
    kind = values.text(f"{arch}.rope.scaling.type", "linear")
    factor = values.positive(f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear")
    more = values.positive(f"{arch}.rope.scaling.attn_factor")
    if more != 1.0 and kind != "yarn":
        raise ModelError(f"{model.path}: {arch}.rope.scaling.attn_factor without yarn is not supported")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and more != 1.0:  # on top of yarn's own
        scaling["attention_factor"] = more * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    names = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    for key, name in names.items():
        value = model.metadata.get(f"{arch}.rope.scaling.{name}")
        if value is not None:
            scaling[key] = value
    return scaling


def gguf_eos_ids(model: GgufModel, vocab_size: int) -> tuple[int, ...]:
    """Ends of text, turn and message, ascending."""
    values = GgufValues(model.metadata, model.path)
    named = {values.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens, kinds = values.texts("tokenizer.ggml.tokens"), values.numbers("tokenizer.ggml.token_type")
    # A look-alike of the normal kind is text.
    known = (_CONTROL, _USER_DEFINED)
    spelled = {i for i, token in enumerate(tokens) if token in _ENDS and i < len(kinds) and kinds[i] in known}
    return tuple(sorted(i for i in {*named, *spelled} if i is not None and 0 <= i < vocab_size))


def gguf_bos_id(model: GgufModel, vocab_size: int) -> int | None:
    """The token a text begins with, whether or not it is added by itself; files that have none may say so by an id
    that does not exist."""
    value = GgufValues(model.metadata, model.path).whole("tokenizer.ggml.bos_token_id")
    return value if value is not None and 0 <= value < vocab_size else None


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
