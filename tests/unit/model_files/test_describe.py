"""Both services describe a model alike; what is no model is refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from common.errors import ModelError
from common.model_files.catalog import resolve
from common.model_files.describe import read_model
from common.model_files.description import SamplingDefaults
from tests.unit.model_files.test_headers import ENTRY, safetensors_bytes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def make_directory(directory: Path, config: dict[str, Any] = CONFIG, **files: object) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(safetensors_bytes({"t": ENTRY}))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def make_gguf(path: Path, **values: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "<|eot_id|>", "<|im_end|>"])
    writer.add_token_types([1, 1, 3, 1])
    for key in values:
        writer.kv_data[0].pop(
            {"token_list": "tokenizer.ggml.tokens", "token_types": "tokenizer.ggml.token_type"}.get(key, ""), None
        )
    for key, value in values.items():
        getattr(writer, f"add_{key}")(*(value if isinstance(value, tuple) else (value,)))
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_directory_is_described(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    path = make_directory(
        tmp_path / "tiny",
        generation_config={"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True},
        tokenizer_config={
            "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"9": {"content": "<end>", "special": True}},
        },
    )
    described = read_model(path).description
    assert described.id == "tiny"
    assert (described.vocab_size, described.max_positions, described.bos_id) == (100, 64, 1)
    assert described.eos_ids == (2, 7, 9)
    assert described.default_sampling == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9)


def test_eos_named_by_the_tokenizer_alone_is_found_in_its_own_file(tmp_path: Path) -> None:
    make_directory(
        tmp_path,
        CONFIG | {"eos_token_id": None},
        tokenizer_config={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 5, "content": "<end>"}]},
    )
    assert read_model(tmp_path).description.eos_ids == (5,)


def test_sampling_switched_off_means_greedy(tmp_path: Path) -> None:
    make_directory(tmp_path, generation_config={"do_sample": False})
    assert read_model(tmp_path).description.default_sampling == SamplingDefaults(temperature=0.0)


def test_a_gguf_file_is_described(tmp_path: Path) -> None:
    files = read_model(make_gguf(tmp_path / "tiny.gguf", eos_token_id=1, bos_token_id=0))
    assert (files.description.id, files.description.vocab_size, files.description.bos_id) == ("tiny", 4, 0)
    assert files.description.eos_ids == (1, 2)  # the control token that ends a turn too, not its look-alike
    told = read_model(make_gguf(tmp_path / "told.gguf", eos_token_id=1, eot_token_id=3)).description
    assert told.eos_ids == (1, 2, 3)


def test_every_token_that_ends_a_text_or_turn_is_an_end_though_a_file_names_one(tmp_path: Path) -> None:
    """Qwen's end of text beside its end of a turn, Llama's three; as in their generation_config.json."""
    tokens = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "a", "b"]
    path = make_gguf(tmp_path / "m.gguf", token_list=tokens, token_types=[3, 3, 3, 3, 4, 1, 1, 1], eos_token_id=1)
    files = read_model(path)
    assert files.description.vocab_size == 4  # rows of the embedding: ids beyond are no tokens of the model
    assert files.description.eos_ids == (0, 1, 3)


def test_special_tokens_that_do_not_exist_are_none(tmp_path: Path) -> None:
    files = read_model(make_gguf(tmp_path / "m.gguf", bos_token_id=2**32 - 1, eos_token_id=99))
    assert files.description.bos_id is None and files.description.eos_ids == (2,)


def test_the_only_gguf_file_of_a_directory_is_its_model(tmp_path: Path) -> None:
    make_gguf(tmp_path / "one.gguf")
    assert read_model(tmp_path).path == tmp_path / "one.gguf"
    make_gguf(tmp_path / "mmproj-F16.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert read_model(tmp_path).path == tmp_path / "one.gguf"
    make_gguf(tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files; name one of them: one\.gguf, two\.gguf"):
        read_model(tmp_path)


def test_the_hash_knows_configuration_header_and_size(tmp_path: Path) -> None:
    first = read_model(make_directory(tmp_path)).description.hash
    assert len(first) == 32
    assert read_model(make_directory(tmp_path)).description.hash == first
    assert read_model(make_directory(tmp_path, CONFIG | {"rope_theta": 5.0})).description.hash != first
    make_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"u": ENTRY}))
    assert read_model(tmp_path).description.hash != first


def test_the_hash_is_the_same_in_another_process_and_place(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    here = read_model(make_directory(tmp_path)).description.hash
    make_directory(tmp_path / "copy")
    code = "import sys; from common.model_files.describe import read_model; from pathlib import Path; " + (
        "print(read_model(Path(sys.argv[1])).description.hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "copy")]
    assert subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip() == here


@pytest.mark.parametrize(
    ("config", "generation", "names"),
    [
        ({"vocab_size": "100"}, {}, r"config\.json: vocab_size"),
        ({"max_position_embeddings": None}, {}, r"config\.json: max_position_embeddings"),
        ({"architectures": None}, {}, r"config\.json: architectures"),
        ({"eos_token_id": "two"}, {}, r"config\.json: eos_token_id"),
        ({}, {"eos_token_id": [1.5]}, r"generation_config\.json: eos_token_id"),
        ({}, {"temperature": "hot"}, r"generation_config\.json: temperature"),
        ({}, {"top_p": 7}, r"generation_config\.json: top_p"),
        ({}, {"top_k": 2.5}, r"generation_config\.json: top_k"),
    ],
)
def test_mistyped_values_are_refused_by_name(
    config: dict[str, Any], generation: dict[str, Any], names: str, tmp_path: Path
) -> None:
    make_directory(tmp_path, CONFIG | config, generation_config=generation)
    with pytest.raises(ModelError, match=names):
        read_model(tmp_path)


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    empty, text, noted = tmp_path / "empty", tmp_path / "text.txt", tmp_path / "noted"
    empty.mkdir()
    noted.mkdir()
    text.write_text("hello")
    (noted / "README.md").write_text("hello")
    for path, words in ((empty, "empty directory"), (text, "not a GGUF file"), (noted, "no model")):
        with pytest.raises(ModelError, match=words) as caught:
            resolve(str(path))
        assert str(path) in caught.value.message
    with pytest.raises(ModelError, match="no such file"):
        resolve(str(tmp_path / "absent"))
    (noted / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: must hold a JSON object"):
        resolve(str(noted))
    (noted / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        resolve(str(noted))


def test_without_weights_the_configuration_alone_is_described(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"random weights.*config\.json"):
        resolve(str(tmp_path), load_format="dummy")
    make_directory(tmp_path)
    with_weights = read_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    files = resolve(str(tmp_path), load_format="dummy")
    assert (files.kind, files.shards, files.gguf) == ("dummy", (), None)
    assert files.description.vocab_size == with_weights.description.vocab_size
    assert files.description.hash != with_weights.description.hash
