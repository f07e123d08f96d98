"""Models and workloads of bench.gpu, and what the numbers are held against. No weights: shapes are served with
`load_format: dummy`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.gpu_load import Load

_LLAMA3: Final = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Any:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        **more,
    }


# Llama-3.2-1B and Llama-3.1-8B; `exact`: few layers in the width of the first, for what is computed in float32.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "l1b": _llama(
        2048, 8192, 16, 32, 8, 128256, max_position_embeddings=131072, tie_word_embeddings=True,
        rope_scaling=_LLAMA3 | {"factor": 32.0},
    ),
    "l8b": _llama(
        4096, 14336, 32, 32, 8, 128256, max_position_embeddings=131072, rope_scaling=_LLAMA3 | {"factor": 8.0}
    ),
    "exact": _llama(2048, 8192, 4, 32, 8, 16384),
    "tiny": _llama(64, 128, 2, 4, 2, 512, initializer_range=0.1),
}  # fmt: skip


def write_shape(name: str, directory: Path, **changes: Any) -> Path:
    """A directory that `--model` takes with `--load-format dummy`."""
    place = directory / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(SHAPES[name] | changes))
    return place


WORKLOADS: Final = {
    "G1": Load(requests=1, at_once=1, prompt=128, output=256),
    "G2": Load(requests=64, at_once=64, prompt=512, output=256),
    "G3": Load(requests=256, at_once=256, prompt=512, output=128),
    "G4": Load(requests=512, at_once=256, prompt=1024, output=128),
}
# The same in a shape for a rehearsal: four sequences at once.
REHEARSED: Final = {
    "G1": Load(requests=1, at_once=1, prompt=12, output=8),
    "G2": Load(requests=4, at_once=4, prompt=24, output=8),
    "G3": Load(requests=4, at_once=4, prompt=24, output=6),
    "G4": Load(requests=8, at_once=4, prompt=48, output=6),
}


@dataclass(frozen=True)
class Goal:
    """Of one model and workload, in `unit`: what vLLM reached, the least the machine allows, what is wanted."""

    unit: str
    vllm: float
    floor: float
    goal: float

    @property
    def rising(self) -> bool:
        """Whether more is better."""
        return self.unit == "tok/s"


PEER: Final = (
    "vLLM 0.25.1 (FlashAttention 3, asynchronous scheduling, CUDA graphs), offline LLM.generate without a network API, "
    "2026-11-29, the same type of machine: one H200, bf16, random weights, greedy, full length. Floors: bytes and "
    "operations at 4.26 TB/s and 790 TFLOP/s measured there."
)
# Device idle before steady steps, µs; what the split may cost; bytes/s of a product of one row.
IDLE_GOAL_US: Final = {"p50": 10.0, "p99": 50.0}
SPLIT_GOAL_PERCENT: Final = 2.0
VECTOR_GOAL_TB_PER_S: Final = 3.6
GOALS: Final = {
    ("l1b", "G1"): Goal("ms/token", 2.44, 0.58, 0.95),
    ("l1b", "G2"): Goal("tok/s", 20230, 33000, 28000),
    ("l1b", "G3"): Goal("tok/s", 29041, 43000, 36000),
    ("l1b", "G4"): Goal("tok/s", 18054, 26000, 22000),
    ("l8b", "G1"): Goal("ms/token", 4.97, 3.77, 4.4),
    ("l8b", "G2"): Goal("tok/s", 6719, 8000, 7200),
    ("l8b", "G3"): Goal("tok/s", 7047, 7800, 7150),
    ("l8b", "G4"): Goal("tok/s", 4025, 4300, 4030),
}
