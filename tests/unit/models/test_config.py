"""Configurations are read strictly; what can not be computed is refused by name."""

from typing import Any

import pytest

from common.errors import ModelError
from executor_svc.models.config import RopeConfig, parse_config

GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    config = parse_config(GOOD, "config.json")
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 4, 1e-6)
    assert config.rope == RopeConfig(10000.0)
    assert not (config.qkv_bias or config.mlp_bias or config.qk_norm or config.tie_embeddings)
    assert parse_config(GOOD | {"num_key_value_heads": None, "head_dim": None}, "config.json") == config


def test_both_ways_of_writing_rope_are_read() -> None:
    old = GOOD | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = GOOD | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert parse_config(old, "x").rope == parse_config(new, "x").rope == RopeConfig(5e5, "linear", 2.0)
    assert parse_config(GOOD | {"rope_theta": 5e5, "rope_scaling": None}, "x").rope == RopeConfig(5e5)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}, (4096,) * 3),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": None}, (0,) * 3),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 9}, (9,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "max_window_layers": 1}, (0,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
            },
            (0, 9, 9),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (9, 0, 0),
        ),
    ],
)
def test_windows_are_those_of_each_architecture(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config(GOOD | changes, "config.json").windows == windows


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": [], "model_type": "mamba"}, "mamba"),
        ({"architectures": None, "model_type": None}, "architecture"),
        ({"hidden_size": "16"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": -4}, "vocab_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "low",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 layer types",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["linear_attention"] * 3,
            },
            "layer_types",
        ),
    ],
)
def test_what_can_not_be_computed_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelError, match=names) as caught:
        parse_config(GOOD | changes, "some/config.json")
    assert "some/config.json" in caught.value.message
