"""Whatever is wrong with a checkpoint ends in a ModelError that names the file, and the tensor where there is one."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize
from safetensors.torch import load_file, save_file

from common.errors import ModelError
from common.model_files.describe import read_model
from common.model_files.description import ModelDescription, ModelFiles, SamplingDefaults
from common.model_files.gguf_model import read_gguf
from executor_svc.loader.load import load_model
from executor_svc.loader.names import Part
from executor_svc.loader.sources import open_source
from tests.reference import PlainOps
from tests.unit.models.checkpoints import make_model, save, write_gguf

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def failure(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(read_model(path), dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())
    return caught.value.message


def change_tensors(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def change_config(checkpoint: Path, **values: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_unsupported_architecture(checkpoint: Path) -> None:
    change_config(checkpoint, architectures=["BloomForCausalLM"])
    message = failure(checkpoint)
    assert "config.json" in message and "BloomForCausalLM" in message and "LlamaForCausalLM" in message


def test_a_missing_tensor(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.pop(Q_PROJ))
    assert Q_PROJ in failure(checkpoint) and str(checkpoint) in failure(checkpoint)


def test_an_untied_model_without_a_head(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in failure(checkpoint)


def test_a_tensor_of_the_wrong_shape(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    message = failure(checkpoint)
    assert Q_PROJ in message and "[64, 32]" in message and "[64, 64]" in message and "model.safetensors" in message


def test_a_tensor_of_the_wrong_type(checkpoint: Path) -> None:
    change_tensors(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    assert Q_PROJ in failure(checkpoint) and "I8" in failure(checkpoint)


def test_a_configuration_that_asks_for_more_layers(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=3)
    assert "model.layers.2" in failure(checkpoint)


def test_a_pickled_checkpoint_is_not_opened(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    trap = checkpoint / "pytorch_model.bin"
    trap.write_bytes(pickle.dumps({}))
    assert "pytorch_model.bin" in failure(checkpoint) and "pickle" in failure(checkpoint)


def test_a_gguf_file_without_a_tensor(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Identity()
    path = write_gguf(model, tmp_path / "model.gguf")
    assert "blk.1.ffn_up.weight" in failure(path) and str(path) in failure(path)


def test_a_gguf_file_of_another_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "bert" in failure(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", list(GGMLQuantizationType), ids=lambda kind: kind.name)
def test_every_type_is_dequantised_as_gguf_does_or_refused_by_name(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (3, 2 * num_bytes), dtype=np.uint8)
    path = tmp_path / "one.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("output_norm.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_gguf(path)
    shape = (3, 2 * elements)
    assert model.tensors["output_norm.weight"].shape == shape
    description = ModelDescription("one", "", "llama", 1, 1, (), None, SamplingDefaults())
    files = ModelFiles(path, "gguf", description, {}, gguf=model)
    part = Part(-1, "final_norm", "", "output_norm.weight", shape)
    with open_source(files) as source:
        try:
            with np.errstate(all="ignore"):
                expected = dequantize(raw, kind)
        except NotImplementedError:
            with pytest.raises(ModelError, match=f"output_norm.weight has type {kind.name}"):
                source.read(part)
            return
        with np.errstate(all="ignore"):
            read = source.read(part).numpy()
    np.testing.assert_array_equal(read.astype(np.float32), expected.astype(np.float32))
