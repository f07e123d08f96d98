"""Every quantised type a GGUF file may hold, as blocks, says what the gguf library's own reader says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from gguf.quants import _type_traits
from numpy.typing import NDArray

from common.model_files.catalog import resolve
from executor_svc.kernels_cpu.decoder import NativeAttention
from executor_svc.kernels_cpu.load import load_native
from executor_svc.kernels_cpu.packing import Format
from executor_svc.kv_cache import KvCache, KvShape
from executor_svc.loader.gguf_blocks import format_of, read_blocks
from executor_svc.loader.load import model_config
from tests.gguf_rows import random_rows
from tests.unit.kernels_cpu.scene import Side, Work, kernels, relative_error
from tests.unit.models.checkpoints import expected_logits, make_model, write_gguf

KEPT = {
    "Q8_0": Format.INT8,
    "Q4_0": Format.INT4_0,
    "Q4_1": Format.INT4,
    "Q4_K": Format.INT4_K,
    "Q5_K": Format.INT5_K,
    "Q6_K": Format.INT6_K,
}
QUANTISED = sorted(kind.name for kind in _type_traits if GGML_QUANT_SIZES[kind][0] > 1)


def rows_of(kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    return random_rows(kind, 24, 2 * GGML_QUANT_SIZES[kind][0])


def of_groups(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1, 32)


@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_are_what_the_library_reads(name: str) -> None:
    kind = GGMLQuantizationType[name]
    raw = rows_of(kind)
    want = dequantize(raw, kind)
    blocks = read_blocks(raw, kind, only_kept=False)
    assert blocks is not None
    assert blocks.format is format_of(kind) is KEPT.get(name, Format.INT8)
    error = np.abs(of_groups(blocks.values()) - of_groups(want)).max(axis=2)
    largest = np.abs(of_groups(want)).max(axis=2)
    if name not in KEPT:  # half a step of 127, and what the scale's own rounding to float16 does to 127 of them
        assert (error <= largest / 254 + largest / 2**11 + 127 * 2.0**-25).all()
    else:
        assert (error <= largest / 2**20).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_only_what_need_not_be_rounded_is_kept(name: str) -> None:
    kind = GGMLQuantizationType[name]
    assert (read_blocks(rows_of(kind), kind, only_kept=True) is not None) == (name in KEPT)


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "BF16"])
def test_floats_stay_floats(name: str) -> None:
    assert format_of(GGMLQuantizationType[name]) is Format.DENSE


def test_rows_are_rounded_in_slabs_and_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = GGMLQuantizationType.Q3_K
    raw = rows_of(kind)
    whole = read_blocks(raw, kind, only_kept=False)
    slabs: list[int] = []

    def counted(rows: NDArray[np.uint8], own: GGMLQuantizationType) -> NDArray[Any]:
        slabs.append(len(rows))
        return dequantize(rows, own)

    monkeypatch.setattr("executor_svc.loader.gguf_blocks.dequantize", counted)
    monkeypatch.setattr("executor_svc.loader.gguf_blocks._SLAB", 5 * 512)
    parts = read_blocks(raw, kind, only_kept=False)
    assert sorted(slabs) == [4, 5, 5, 5, 5]
    assert whole is not None
    assert parts is not None
    np.testing.assert_array_equal(parts.values(), whole.values())


def kind_in_q4_k_m(name: str) -> GGMLQuantizationType:
    """Of a model of two layers, much as llama.cpp's "Q4_K_M": the values and what leaves the MLP have more bits, if not
    in every layer, and so has the embedding that is the head too."""
    more = "token_embd" in name or name in ("blk.0.attn_v.weight", "blk.0.ffn_down.weight")
    return GGMLQuantizationType.Q6_K if more else GGMLQuantizationType.Q4_K


def test_a_model_of_mixed_types_runs_in_few_bits(tmp_path: Path) -> None:
    model = make_model("llama-tied", hidden_size=256, intermediate_size=512)
    files = resolve(str(write_gguf(model, tmp_path / "model.gguf", kind_in_q4_k_m)))
    config = model_config(files)
    decoder = load_native(files, config, kernels(), wanted=None, threads=1)
    first, second = decoder.weights.layers
    assert first.qkv.format is Format.INT8  # of both kinds
    assert first.down.format is decoder.weights.head.format is Format.INT6_K
    others = (first.output, first.gate_up, second.qkv, second.output, second.gate_up, second.down)
    assert {matrix.format for matrix in others} == {Format.INT4_K}

    ids = list(range(90))
    cache = KvCache(KvShape(2, 2, 64, 16, torch.bfloat16), 8, lambda size, dtype: torch.zeros(size, dtype=dtype))
    side = Side(decoder, NativeAttention(), cache)
    tables = torch.arange(8, dtype=torch.int32)[None]
    got = torch.cat([side.step([Work(0, 0, ids[:70])], tables), side.step([Work(0, 70, ids[70:])], tables)])
    assert relative_error(got, expected_logits(model, ids)) < 0.02
