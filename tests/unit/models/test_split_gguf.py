"""A model in parts computes what it computes in one file, and its tokenizer is that of the first part."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from common.model_files.describe import read_model
from executor_svc.kernels_cpu.library import Library
from executor_svc.kernels_cpu.load import load_native
from executor_svc.loader.load import load_model, model_config
from executor_svc.weights_fit import native_bytes
from scheduler_svc.tokenizer import load_tokenizer
from tests.reference import PlainOps, logits_of
from tests.unit.models.checkpoints import expected_logits, make_model, write_gguf

IDS = [1, 5, 9, 70, 33, 2, 95, 0]
SPLITS: list[dict[str, Any]] = [
    {"split_max_tensors": 3},
    {"split_max_tensors": 7, "small_first_shard": True},
    {"split_max_size": 100_000},
]


def k_quants(name: str) -> GGMLQuantizationType:
    """Of mixed types, as quantisers write them."""
    return GGMLQuantizationType.Q6_K if "attn_v" in name or "down" in name else GGMLQuantizationType.Q4_K


@pytest.mark.parametrize("split", SPLITS, ids=["tensors", "bare-first", "size"])
def test_parts_are_one_model(split: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("llama3")  # with rope_freqs.weight
    write_gguf(copy.deepcopy(model), tmp_path / "model.gguf", **split)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    decoder = load_model(read_model(parts[1]), dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())
    torch.testing.assert_close(logits_of(decoder, IDS), expected_logits(model, IDS), atol=2e-4, rtol=1e-4)


def test_blocks_stay_as_the_parts_have_them(tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=256, intermediate_size=256)
    (tmp_path / "split").mkdir()
    write_gguf(model, tmp_path / "split" / "model.gguf", k_quants, split_max_tensors=4)
    write_gguf(model, tmp_path / "model.gguf", k_quants)
    parts, whole = read_model(tmp_path / "split"), read_model(tmp_path / "model.gguf")
    config, none = model_config(whole), cast(Library, None)  # no step is computed
    loaded = [load_native(files, config, none, wanted=None, threads=1).weights for files in (parts, whole)]
    assert native_bytes(parts, config, None) == native_bytes(whole, config, None)
    assert loaded[0].step_bytes == loaded[1].step_bytes
    for ours, theirs in zip(loaded[0].layers, loaded[1].layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.format is other.format and torch.equal(one.data, other.data)


def test_the_tokenizer_and_its_template_are_those_of_the_first_part(tmp_path: Path) -> None:
    def vocabulary(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a", "▁a", *(f"t{i}" for i in range(90))])
        writer.add_token_scores([-float(i) for i in range(96)])
        writer.add_token_types([2, 3, 3, *[1] * 93])
        writer.add_bos_token_id(1)
        writer.add_chat_template("{{ messages[0].content }}")

    write_gguf(make_model("llama"), tmp_path / "model.gguf", extra=vocabulary, split_max_tensors=5)
    tokenizer = load_tokenizer(read_model(sorted(tmp_path.iterdir())[-1]))
    assert tokenizer is not None and tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.encode("a") == [1, 5]
