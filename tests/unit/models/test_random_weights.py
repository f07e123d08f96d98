"""Random weights stand in for a checkpoint's: every tensor of the configuration, the same each time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ModelError
from common.model_files.describe import read_model
from executor_svc.kernels_cpu.packing import Blocks
from executor_svc.loader.load import load_model, model_config
from executor_svc.loader.names import Part, parts
from executor_svc.loader.sources import open_source
from executor_svc.models.decoder import Decoder
from tests.reference import PlainOps

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
}


def load(directory: Path, **changes: Any) -> Decoder:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    files = read_model(directory, dummy=True)
    return load_model(files, dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())


def test_every_tensor_is_there_and_the_same_each_time(tmp_path: Path) -> None:
    first, again = load(tmp_path).weights, load(tmp_path).weights
    layer = first.layers[1]
    assert torch.equal(layer.qkv, again.layers[1].qkv) and torch.equal(first.head, again.head)
    assert layer.qkv.std().item() == pytest.approx(0.1, rel=0.1)
    assert layer.qkv_bias is not None and bool(layer.qkv_bias.any())
    assert bool((layer.input_norm == 1).all())
    assert not torch.equal(layer.qkv, first.layers[0].qkv)
    assert first.head is not first.embedding and not torch.equal(first.head, first.embedding)


def test_tensors_depend_on_their_names_alone(tmp_path: Path) -> None:
    assert torch.equal(load(tmp_path).weights.head, load(tmp_path, num_hidden_layers=1).weights.head)


def test_the_deviation_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: initializer_range"):
        load(tmp_path, initializer_range="wide")


def test_the_kernels_get_plain_tensors(tmp_path: Path) -> None:
    load(tmp_path)
    files = read_model(tmp_path, dummy=True)

    def found(part: Part) -> Blocks | torch.Tensor:
        return source.read_blocks(part) or source.read(part)

    with open_source(files) as source:
        assert all(isinstance(found(part), torch.Tensor) for part in parts(model_config(files)))
        assert source.rope_divisors(8) is None
