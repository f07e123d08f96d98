"""Quantised blocks: from GGUF, from floats, into the kernels' order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

from common.model_files.gguf_model import read_gguf
from executor_svc.kernels_cpu.packing import Blocks, Format, pack, quantise
from executor_svc.loader.names import Part
from executor_svc.loader.sources import _GgufSource, _map


def matrix(rows: int = 64, depth: int = 96, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((rows, depth), np.float32)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("heads", [0, 2])
def test_blocks_of_a_gguf_file_say_what_its_reader_says(tmp_path: Path, kind: GGMLQuantizationType, heads: int) -> None:
    path = tmp_path / "one.gguf"
    raw = quantize(matrix(), kind)
    writer = GGUFWriter(str(path), "llama")
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = _GgufSource(read_gguf(path), {path: _map(path)}, permuted=True)
    part = Part(0, "qkv", "q", "blk.0.attn_q.weight", (64, 96), rotary_heads=heads)
    blocks = source.read_blocks(part)
    assert blocks is not None
    formats = {"Q8_0": Format.INT8, "Q4_0": Format.INT4_0, "Q4_1": Format.INT4}
    assert blocks.format is formats[kind.name]
    np.testing.assert_allclose(blocks.values(), source.read(part).numpy(), rtol=1e-6, atol=1e-6)
    if not heads:
        np.testing.assert_allclose(blocks.values(), dequantize(raw, kind), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("wanted", "error"), [(Format.INT8, 0.01), (Format.INT4, 0.11)])
def test_quantising_stays_within_half_a_step(wanted: Format, error: float) -> None:
    values = matrix()
    blocks = quantise(values, wanted)
    span = np.repeat(blocks.scales.astype(np.float32), 32, axis=1)
    assert (np.abs(blocks.values() - values) <= 0.51 * span + 2e-3).all()
    assert np.sqrt(np.mean((blocks.values() - values) ** 2)) < error
    zeros = quantise(np.zeros((2, 32), np.float32), wanted)
    assert (zeros.values() == 0).all()


def test_a_panel_is_read_from_one_end_to_the_other() -> None:
    """bfloat16 of column 17 and depth 35: panel 0, piece 1, tile 1, pair 1, column 1, second of the pair."""
    dense = torch.arange(32 * 64, dtype=torch.float32).view(32, 64) % 251
    packed = pack([dense], Format.DENSE)
    values = packed.data.view(torch.bfloat16)
    assert values[1 * 1024 + 1 * 512 + 1 * 32 + 1 * 2 + 1] == dense[17, 35]
    assert packed.data.data_ptr() % 64 == 0


def test_mixed_pieces_become_dense_and_gates_interleave() -> None:
    gate, up = matrix(32, 32, 1), matrix(32, 32, 2)
    packed = pack([quantise(gate, Format.INT8), torch.from_numpy(up)], None, gated=True, bias=torch.arange(64.0))
    assert packed.format is Format.DENSE
    assert (packed.columns, packed.depth) == (64, 32)
    assert packed.bias is not None
    assert packed.bias.tolist() == [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]
    first_of_up = packed.data.view(torch.bfloat16)[512]
    assert first_of_up == torch.tensor(up[0, 0]).bfloat16()


def test_blocks_stay_what_they_are() -> None:
    blocks = quantise(matrix(), Format.INT4)
    assert pack([blocks], None).format is Format.INT4
    assert pack([blocks], None).num_bytes == 64 * 96 * 5 // 8
    assert isinstance(blocks, Blocks)
    assert pack([blocks], Format.INT8).num_bytes == 64 * 96 * 17 // 16
