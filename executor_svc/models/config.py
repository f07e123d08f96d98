"""The decoder's shape, read strictly from a model's configuration in Hugging Face's form (a GGUF file's metadata is
turned into that form by common.model_files)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind`: "default", "linear", "llama3" or "yarn"; a field its kind lacks keeps its default."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder and the attention over its cache must know.

    `windows[layer]`: positions a token of that layer attends to, its own included; 0: all before it. Attention scores
    are scaled by head_dim ** -0.5 in every architecture here.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads can not share {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ModelError(f"rotary embedding needs an even head_dim, not {self.head_dim}")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"{len(self.windows)} layer types for {self.num_layers} layers")

    @property
    def num_parameters(self) -> int:
        """Weights in matrices (norms and biases left out), tied ones counted once."""
        heads = self.num_heads + 2 * self.num_kv_heads
        layer = (
            self.hidden_size * self.head_dim * (heads + self.num_heads) + 3 * self.hidden_size * self.intermediate_size
        )
        embedding = self.vocab_size * self.hidden_size
        return layer * self.num_layers + embedding * (1 if self.tie_embeddings else 2)


class _Reader:
    """Typed access to one JSON object; every complaint names the file and the key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self._source}: {text}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key} must be an integer, not {value!r}")
        if value < minimum:
            raise self.error(f"{key} must be at least {minimum}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return key in self._values


def architecture_of(config: Mapping[str, Any], source: str) -> str:
    """The decoder family. Raises ModelError for one that this decoder does not compute."""
    names = config.get("architectures")
    if isinstance(names, list) and names:
        for name in names:
            if name in ARCHITECTURES:
                return ARCHITECTURES[name]
        named = ", ".join(map(str, names))
    else:
        model_type = config.get("model_type")
        if model_type in ARCHITECTURES.values():
            return str(model_type)
        named = str(model_type)
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"{source}: architecture {named} is not supported; supported are {known}")


def parse_config(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Hugging Face config.json (of transformers 4 or 5) → ModelConfig. `source` names the file in errors.

    A missing key has the default of transformers' class for that architecture. Raises ModelError.
    """
    architecture = architecture_of(config, source)
    read = _Reader(config, source)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise read.error(f"hidden_act {activation!r} is not supported; this decoder computes silu")
    if "quantization_config" in config:
        raise read.error("quantization_config: quantised safetensors are not supported; a quantised GGUF file is")
    hidden = read.integer("hidden_size")
    heads = read.integer("num_attention_heads")
    layers = read.integer("num_hidden_layers")
    kv_default = {"mistral": 8}.get(architecture, heads)
    if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
        kv_default = heads
    attention_bias = read.flag("attention_bias", False) if architecture in ("llama", "qwen3") else False
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.integer("num_key_value_heads", kv_default),
            head_dim=read.integer("head_dim", 128 if architecture == "qwen3" else hidden // heads),
            max_positions=read.integer("max_position_embeddings"),
            windows=_windows(read, architecture, layers),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope=_rope(read, source),
            qkv_bias=attention_bias or architecture == "qwen2",
            output_bias=attention_bias,
            mlp_bias=read.flag("mlp_bias", False) if architecture == "llama" else False,
            qk_norm=architecture == "qwen3",
            tie_embeddings=read.flag("tie_word_embeddings", False),
        )
    except ModelError as error:
        if error.message.startswith(source):
            raise
        raise read.error(error.message) from None


def _windows(read: _Reader, architecture: str, layers: int) -> tuple[int, ...]:
    if architecture == "llama":
        return (0,) * layers
    if architecture == "mistral":
        # null switches the window off; a missing key is transformers' default.
        return (read.integer("sliding_window", 0 if read.has("sliding_window") else 4096),) * layers
    if not read.flag("use_sliding_window", False):
        return (0,) * layers
    window = read.integer("sliding_window", 4096)
    kinds = read.get("layer_types")
    if kinds is None:
        first = read.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(kinds, list) or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise read.error(f"layer_types must list full_attention and sliding_attention, not {kinds!r}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(read: _Reader, source: str) -> RopeConfig:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_theta` beside `rope_scaling`."""
    values: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = read.get(key)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise read.error(f"{key} must be an object, not {part!r}")
        values.update(part)
    rope = _Reader(values, f"{source}: rope_parameters")
    theta = rope.number("rope_theta", read.number("rope_theta", 10000.0))
    if rope.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0)) != 1.0:
        raise read.error("partial_rotary_factor other than 1 is not supported")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", rope.number("factor"))
    original = rope.integer("original_max_position_embeddings", read.integer("max_position_embeddings"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeConfig(theta, "llama3", rope.number("factor"), original, low, high)
    if kind == "yarn":
        factor = rope.number("factor", read.integer("max_position_embeddings") / original)
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.number("attention_factor", _yarn_attention(rope, factor)),
            truncate=rope.flag("truncate", True),
        )
    raise read.error(f"rope_type {kind!r} is not supported; supported are default, linear, llama3 and yarn")


def _yarn_attention(rope: _Reader, factor: float) -> float:
    """The factor on cosine and sine where the configuration names none. Source: arXiv 2309.00071, section 3.4."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
