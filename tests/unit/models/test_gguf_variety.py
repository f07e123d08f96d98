"""What GGUF files of these architectures say in more than one way, or say and mean no such model."""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFEndian, GGUFWriter

from common.errors import ModelError
from common.model_files.describe import read_model
from executor_svc.loader.load import load_model
from scheduler_svc.tokenizer import load_tokenizer
from tests.reference import PlainOps, logits_of
from tests.unit.models.checkpoints import YARN, expected_logits, make_model, write_gguf

IDS = [1, 5, 9, 70, 33, 2, 95, 0] * 5
SCALING = "llama.rope.scaling."
Change = Callable[[GGUFWriter], Any]


def drop(writer: GGUFWriter, *keys: str) -> None:
    for key in keys:
        writer.kv_data[0].pop(f"{writer.arch}.{key}")


def instead(writer: GGUFWriter, key: str, value: list[int]) -> None:
    drop(writer, key)
    writer.add_array(f"{writer.arch}.{key}", value)


def both(first: Change, second: Change) -> Change:
    return lambda writer: [first(writer), second(writer)]


def number(key: str, value: float) -> Change:
    return lambda writer: writer.add_float32(key, value)


SAME: dict[str, tuple[str, dict[str, Any], Change]] = {
    "no scaling, whatever the factor": (
        "llama",
        {},
        both(lambda w: w.add_string(f"{SCALING}type", "none"), number(f"{SCALING}factor", 4.0)),
    ),
    "linear without a factor": ("llama", {}, lambda w: w.add_string(f"{SCALING}type", "linear")),
    "a factor of 0": ("llama", {}, number(f"{SCALING}factor", 0.0)),
    "the older name of the factor": (
        "llama-linear",
        {},
        both(lambda w: drop(w, "rope.scaling.type", "rope.scaling.factor"), number("llama.rope.scale_linear", 2.0)),
    ),
    "yarn with a factor of 1 on attention": ("llama-yarn", {}, number(f"{SCALING}attn_factor", 1.0)),
    "yarn's two ends": (
        "llama-yarn",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
        both(number(f"{SCALING}yarn_beta_fast", 16.0), number(f"{SCALING}yarn_beta_slow", 2.0)),
    ),
    "one number of heads for each layer": ("llama", {}, lambda w: instead(w, "attention.head_count_kv", [2, 2])),
    "one width for each layer": ("qwen3", {}, lambda w: instead(w, "feed_forward_length", [96, 96])),
    "heads that share the width": (
        "qwen3",
        {"head_dim": 16},
        lambda w: drop(w, "attention.key_length", "attention.value_length"),
    ),
    "no number of key/value heads": (
        "llama", {"num_key_value_heads": 4}, lambda w: drop(w, "attention.head_count_kv")
    ),
    "a flag written as a number": ("llama", {}, lambda w: w.add_uint8("llama.attention.causal", 1)),
    "a theta that is usual": ("llama", {}, lambda w: drop(w, "rope.freq_base")),
}  # fmt: skip


@pytest.mark.parametrize("said", SAME)
def test_what_is_said_otherwise_is_the_same_model(said: str, tmp_path: Path) -> None:
    case, changes, extra = SAME[said]
    model = make_model(case, **changes)
    files = read_model(write_gguf(model, tmp_path / "model.gguf", extra=extra))
    decoder = load_model(files, dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())
    torch.testing.assert_close(logits_of(decoder, IDS), expected_logits(model, IDS), atol=2e-4, rtol=1e-4)


def test_a_factor_on_attention_comes_on_top_of_yarns_own(tmp_path: Path) -> None:
    """As in llama.cpp; transformers' attention_factor stands instead of it."""
    factor = 0.8 * (0.1 * math.log(4.0) + 1)  # YARN's
    model = make_model("llama-yarn", rope_parameters={**YARN, "attention_factor": factor})
    path = write_gguf(model, tmp_path / "model.gguf", extra=number(f"{SCALING}attn_factor", 0.8))
    decoder = load_model(read_model(path), dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())
    torch.testing.assert_close(logits_of(decoder, IDS), expected_logits(model, IDS), atol=2e-4, rtol=1e-4)


REFUSED: dict[str, Change] = {
    "rope_type 'longrope' is not supported": lambda w: w.add_string(f"{SCALING}type", "longrope"),
    "attn_factor without yarn": number(f"{SCALING}attn_factor", 0.8),
    "rope.scaling.factor must be a positive number": number(f"{SCALING}factor", -1.0),
    "rotary embedding of a part of the head": lambda w: w.add_rope_dimension_count(8),
    "key_length and value_length differ": both(
        lambda w: drop(w, "attention.value_length"), lambda w: w.add_value_length(8)
    ),
    "head_count_kv differs from layer to layer": lambda w: instead(w, "attention.head_count_kv", [2, 1]),
    "llama.block_count must be a whole number": lambda w: w.add_string("llama.block_count", "2"),
    "llama.block_count is 2147483647, there are": lambda w: w.add_block_count(2**31 - 1),
    "tensor blk.0.ffn_gate.weight has shape [96, 64], the configuration asks for [4096, 64]": lambda w: (
        w.add_feed_forward_length(4096)
    ),
    "llama.context_length is missing": lambda w: drop(w, "context_length"),
    "mixture-of-experts": lambda w: w.add_expert_count(4),
    "attention to later tokens": lambda w: w.add_causal_attention(False),
    "general.type is 'adapter'": lambda w: w.add_type("adapter"),
    "tensor blk.0.attn_q.scale belongs to no llama model of 2 layers": lambda w: w.add_tensor(
        "blk.0.attn_q.scale", np.ones(1, np.float32)
    ),
    "tensor blk.2.ffn_up.weight belongs to no": lambda w: w.add_tensor("blk.2.ffn_up.weight", np.ones((96, 64), "f4")),
    "tokenizer.ggml.eos_token_id must be a whole number": lambda w: w.add_string("tokenizer.ggml.eos_token_id", "2"),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(words: str, tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf", extra=REFUSED[words])
    with pytest.raises(ModelError) as caught:
        load_model(read_model(path), dtype=torch.float32, device=torch.device("cpu"), ops=PlainOps())
    assert words in caught.value.message and str(path) in caught.value.message


def test_byte_order_and_version_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"model\.gguf: a big-endian GGUF file"):
        read_model(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(64))
    with pytest.raises(ModelError, match=r"model\.gguf: GGUF version 1 is not supported"):
        read_model(path)


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(ModelError, match=r"model\.gguf: tensor blk\.0\.attn_k\.weight is in it twice"):
        read_model(path)


KEYS = [
    *("general.architecture", "general.type", "general.alignment", "split.count", "split.no"),
    *(f"llama.{key}" for key in ("block_count", "context_length", "attention.head_count", "attention.sliding_window")),
    *(f"llama.{key}" for key in ("expert_count", "rope.scaling.type", "rope.scaling.factor", "rope.freq_base")),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token")),
    *(f"tokenizer.ggml.{key}" for key in ("bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id")),
    *("tokenizer.chat_template", "general.sampling.temp"),
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_value_of_another_type_never_ends_in_anything_but_a_model_error(key: str, model: str, tmp_path: Path) -> None:
    odd: tuple[Any, ...] = ("x", 7, -7, 0.5, True, ["x", "y"], [3, 4], [[1], [2]])
    for value in odd:
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_context_length(64)
        writer.add_tokenizer_model(model)
        writer.add_token_list(["a", "b", "ab", "<|im_end|>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(3)
        writer.kv_data[0].pop(key, None)
        (writer.add_array if isinstance(value, list) else _adder(writer, value))(key, value)
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        try:
            tokenizer = load_tokenizer(read_model(path))
            assert tokenizer is None or tokenizer.encode("ab")
        except ModelError as error:
            assert str(path) in error.message


def _adder(writer: GGUFWriter, value: Any) -> Callable[[str, Any], None]:
    adders: dict[type, Any] = {
        str: writer.add_string, bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32
    }  # fmt: skip
    adder: Callable[[str, Any], None] = adders[type(value)]
    return adder
