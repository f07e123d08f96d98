"""Headers of damaged files: a ModelError that names the file, never another exception, never a wild allocation."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ModelError
from common.model_files.gguf_header import read_gguf_header
from common.model_files.safetensors_header import INDEX_NAME, read_safetensors_header, read_shards

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "häßlich")
    writer.add_array("some.words", ["a", "", "日本"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.zeros((4, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def safetensors_bytes(entries: object, data: int = 16) -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def test_a_gguf_header_says_what_was_written(tmp_path: Path) -> None:
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf"))
    assert header.metadata["a.number"] == 7
    assert header.metadata["a.float"] == 0.5
    assert header.metadata["a.flag"] is True
    assert header.metadata["a.text"] == "häßlich"
    assert header.metadata["some.words"] == ["a", "", "日本"]
    assert header.metadata["some.numbers"].tolist() == [1, 2, 3]
    first, second = header.tensors["first"], header.tensors["second"]
    assert (first.shape, first.type, first.num_bytes) == ((2, 3), GGMLQuantizationType.F32, 24)
    assert (second.shape, second.type, second.num_bytes) == ((4, 32), GGMLQuantizationType.Q8_0, 4 * 34)
    raw = (tmp_path / "m.gguf").read_bytes()[first.offset : first.offset + first.num_bytes]
    assert np.frombuffer(raw, np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_gguf_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf")
    tensor = read_gguf_header(whole).tensors["second"]
    raw = whole.read_bytes()[: tensor.offset + tensor.num_bytes]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(raw)
    read_gguf_header(cut)
    for size in range(len(raw)):
        cut.write_bytes(raw[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf_header(cut)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(4, 400), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_gguf_file_never_raises_anything_else(position: int, value: bytes, tmp_path: Path) -> None:
    whole = tmp_path / "m.gguf"
    raw = bytearray(whole.read_bytes() if whole.exists() else write_gguf(whole).read_bytes())
    raw[position : position + len(value)] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(raw)
    try:
        read_gguf_header(damaged)
    except ModelError as error:
        assert "damaged.gguf" in error.message


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    nested = struct.pack("<IQ", 9, 1) * 100_000
    key = struct.pack("<Q", 1) + b"k"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 9) + nested)
    with pytest.raises(ModelError, match=r"deep\.gguf"):
        read_gguf_header(path)


def test_what_is_no_gguf_file_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "note.gguf"
    path.write_text("hello, this is text")
    with pytest.raises(ModelError, match=r"note\.gguf: not a GGUF file"):
        read_gguf_header(path)
    with pytest.raises(ModelError, match="can not be read"):
        read_gguf_header(tmp_path / "absent.gguf")


def test_a_safetensors_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    raw = safetensors_bytes({"t": ENTRY})
    path = tmp_path / "cut.safetensors"
    path.write_bytes(raw)
    assert read_safetensors_header(path).tensors["t"].shape == (2, 2)
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(ModelError, match=r"cut\.safetensors: .*truncated|not a safetensors"):
            read_safetensors_header(path)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 40,
        safetensors_bytes([1, 2]),
        safetensors_bytes({"t": 5}),
        safetensors_bytes({"t": {"dtype": "F32"}}),
        safetensors_bytes({"t": ENTRY | {"shape": "ab"}}),
        safetensors_bytes({"t": ENTRY}, data=99),
        safetensors_bytes({"t": ENTRY | {"data_offsets": [0]}}),
        struct.pack("<Q", 3) + b"\xff\xfe{",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_what_is_no_safetensors_file_is_refused_by_name(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"odd\.safetensors"):
        read_safetensors_header(path)


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_must_fit_its_files(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(safetensors_bytes({"a": ENTRY}))
    write_index(tmp_path, {"a": "one.safetensors"})
    assert [shard.path.name for shard in read_shards(tmp_path)] == ["one.safetensors"]
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(ModelError, match=r"one\.safetensors: tensor b is missing"):
        read_shards(tmp_path)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(ModelError, match=r"two\.safetensors: missing"):
        read_shards(tmp_path)
    write_index(tmp_path, {"a": "../one.safetensors"})
    with pytest.raises(ModelError, match="outside"):
        read_shards(tmp_path)
    write_index(tmp_path, ["a"])
    with pytest.raises(ModelError, match="weight_map"):
        read_shards(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_shards(tmp_path)
