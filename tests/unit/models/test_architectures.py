"""Every architecture, as transformers saves it and as GGUF, gives transformers' logits."""

import copy
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import _type_traits

from common.model_files.describe import read_model
from executor_svc.loader.load import load_model, model_dtype
from executor_svc.models.decoder import Decoder
from tests.reference import PlainOps, logits_of
from tests.unit.models.checkpoints import CASES, expected_logits, make_model, save, write_gguf

IDS = [1, 5, 9, 70, 33, 2, 2, 95, 0, 18, 44, 61, 12, 12, 80, 7, 3, 50, 21, 66] * 3
GGUF_CASES = [case for case in CASES if case not in ("mistral-window", "qwen2-window")]
# All that the gguf library reads.
QUANTISATIONS = ["F16", *sorted(kind.name for kind in _type_traits)]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(read_model(path), dtype=dtype, device=torch.device("cpu"), ops=PlainOps())


def assert_same(decoder: Decoder, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits_of(decoder, IDS), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_directory_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    assert_same(load(save(model, tmp_path)), expected_logits(model, IDS))


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_gguf_file_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_model(case)
    assert_same(load(write_gguf(model, tmp_path / "model.gguf")), expected_logits(model, IDS))


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_quantised_weights_are_what_the_file_means(quantisation: str, tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=256, intermediate_size=256)
    path = write_gguf(model, tmp_path / "model.gguf", GGMLQuantizationType[quantisation])
    assert_same(load(path), expected_logits(model, IDS))


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    save(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path), expected_logits(model, IDS))


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16])
def test_weights_are_converted_on_load(saved: torch.dtype, tmp_path: Path) -> None:
    model = make_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(saved))
    save(copy.deepcopy(model).to(saved), tmp_path)
    assert model_dtype(read_model(tmp_path)) == saved
    assert_same(load(tmp_path), expected_logits(model, IDS))
    assert load(tmp_path, torch.bfloat16).weights.layers[0].qkv.dtype == torch.bfloat16


def test_sixteen_bit_decoders_run_close_to_float32(tmp_path: Path) -> None:
    model = make_model("qwen3")
    logits = logits_of(load(save(model, tmp_path), torch.bfloat16), IDS)
    assert logits.dtype == torch.float32
    expected = expected_logits(model, IDS)
    assert float((logits - expected).norm() / expected.norm()) < 0.1


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    files = read_model(save(make_model("qwen2"), tmp_path))
    seen: list[tuple[int, int]] = []
    decoder = load_model(
        files,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ops=PlainOps(),
        progress=lambda activity, done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (decoder.weights.num_bytes, decoder.weights.num_bytes)
