"""What each tensor of a checkpoint is called in the two formats, and which shape it must have."""

from collections.abc import Iterator
from dataclasses import dataclass

from executor_svc.models.config import ModelConfig

EMBEDDING = "embedding"
FINAL_NORM = "final_norm"
HEAD = "head"
ROPE_DIVISORS = "rope_freqs.weight"  # in GGUF alone

# Our field of LayerWeights -> parts stacked into it, in order. Each part: (Hugging Face, GGUF) name inside the layer.
_MATRICES = {
    "input_norm": (("input_layernorm.weight", "attn_norm.weight"),),
    "qkv": (
        ("self_attn.q_proj.weight", "attn_q.weight"),
        ("self_attn.k_proj.weight", "attn_k.weight"),
        ("self_attn.v_proj.weight", "attn_v.weight"),
    ),
    "output": (("self_attn.o_proj.weight", "attn_output.weight"),),
    "post_norm": (("post_attention_layernorm.weight", "ffn_norm.weight"),),
    "gate_up": (("mlp.gate_proj.weight", "ffn_gate.weight"), ("mlp.up_proj.weight", "ffn_up.weight")),
    "down": (("mlp.down_proj.weight", "ffn_down.weight"),),
}
_QKV_BIAS = (
    ("self_attn.q_proj.bias", "attn_q.bias"),
    ("self_attn.k_proj.bias", "attn_k.bias"),
    ("self_attn.v_proj.bias", "attn_v.bias"),
)
_OUTPUT_BIAS = (("self_attn.o_proj.bias", "attn_output.bias"),)
_GATE_UP_BIAS = (("mlp.gate_proj.bias", "ffn_gate.bias"), ("mlp.up_proj.bias", "ffn_up.bias"))
_DOWN_BIAS = (("mlp.down_proj.bias", "ffn_down.bias"),)
_Q_NORM = (("self_attn.q_norm.weight", "attn_q_norm.weight"),)
_K_NORM = (("self_attn.k_norm.weight", "attn_k_norm.weight"),)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint: rows [start, start + shape[0]) of `field` of `layer` (-1: of the whole decoder).

    `rotary_heads`: attention heads in it when its rows are rotated by position (q and k), else 0.
    """

    layer: int
    field: str
    hf_name: str
    gguf_name: str
    shape: tuple[int, ...]
    start: int = 0
    rotary_heads: int = 0


def parts(config: ModelConfig) -> Iterator[Part]:
    """Every tensor the decoder needs. A tied head is not among them."""
    embedding = (config.vocab_size, config.hidden_size)
    yield Part(-1, EMBEDDING, "model.embed_tokens.weight", "token_embd.weight", embedding)
    for layer in range(config.num_layers):
        for field, names in _layer_fields(config).items():
            start = 0
            for hf, gguf in names:
                shape = _shape(config, hf)
                yield Part(
                    layer,
                    field,
                    f"model.layers.{layer}.{hf}",
                    f"blk.{layer}.{gguf}",
                    shape,
                    start,
                    _rotary_heads(config, hf),
                )
                start += shape[0]
    yield Part(-1, FINAL_NORM, "model.norm.weight", "output_norm.weight", (config.hidden_size,))
    if not config.tie_embeddings:
        yield Part(-1, HEAD, "lm_head.weight", "output.weight", embedding)


def _layer_fields(config: ModelConfig) -> dict[str, tuple[tuple[str, str], ...]]:
    fields = dict(_MATRICES)
    if config.qkv_bias:
        fields["qkv_bias"] = _QKV_BIAS
    if config.output_bias:
        fields["output_bias"] = _OUTPUT_BIAS
    if config.mlp_bias:
        fields |= {"gate_up_bias": _GATE_UP_BIAS, "down_bias": _DOWN_BIAS}
    if config.qk_norm:
        fields |= {"q_norm": _Q_NORM, "k_norm": _K_NORM}
    return fields


def _shape(config: ModelConfig, hf: str) -> tuple[int, ...]:
    module, _, kind = hf.rpartition(".")
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
    }
    shape: tuple[int, ...] = shapes.get(module, (hidden,))
    return shape[:1] if kind == "bias" else shape


def _rotary_heads(config: ModelConfig, hf: str) -> int:
    if hf.startswith("self_attn.q_proj"):
        return config.num_heads
    return config.num_kv_heads if hf.startswith("self_attn.k_proj") else 0
