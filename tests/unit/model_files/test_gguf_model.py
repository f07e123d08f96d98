"""A split GGUF file is one model, whichever part is named; parts that do not belong together are refused by name."""

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from common.errors import ModelError
from common.model_files.describe import read_model
from common.model_files.gguf_model import read_gguf
from common.model_files.gguf_parts import one_a_model, parse_part
from tests.unit.model_files.test_describe import make_gguf


def split_gguf(path: Path, layers: int = 4, **options: Any) -> list[Path]:
    """The parts, two tensors each unless `options` of GGUFWriter say otherwise."""
    writer = GGUFWriter(path, "llama", **{"split_max_tensors": 2, **options})
    writer.add_context_length(64)
    writer.add_eos_token_id(3)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.full(8, layer, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*.gguf"))


def change(path: Path, key: str, value: int) -> None:
    """Of a part's uint16 or int32 in the metadata."""
    raw = bytearray(path.read_bytes())
    at = raw.index(key.encode()) + len(key)
    (kind,) = struct.unpack_from("<I", raw, at)
    struct.pack_into({2: "<H", 5: "<i"}[kind], raw, at + 4, value)
    path.write_bytes(raw)


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_model(path)
    return caught.value.message


def test_the_names_of_parts() -> None:
    part = parse_part("folder/x-Q8_0-00002-of-00003.gguf")
    assert part is not None and (part.stem, part.number, part.count) == ("folder/x-Q8_0", 2, 3)
    assert part.names() == tuple(f"folder/x-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    for whole in ("x.gguf", "x-1-of-2.gguf", "x-00003-of-00002.gguf", "x-00000-of-00002.gguf", "x-00001-of-00002.bin"):
        assert parse_part(whole) is None
    names = ["a-00002-of-00003.gguf", "a.gguf", "a-00001-of-00003.gguf", "a-00001-of-00002.gguf", "b.gguf"]
    assert one_a_model(names) == ["a-00001-of-00003.gguf", "a.gguf", "a-00001-of-00002.gguf", "b.gguf"]


@pytest.mark.parametrize("options", [{}, {"small_first_shard": True}], ids=["", "no-tensor-first"])
def test_any_part_and_the_folder_name_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    parts = split_gguf(tmp_path / "tiny.gguf", **options)
    assert len(parts) == (4 if options else 3)
    described = [read_model(path) for path in (*parts, tmp_path)]
    assert {files.path for files in described} == {parts[0]}
    assert len({files.description.hash for files in described}) == 1
    (files, *_) = described
    assert (files.description.id, files.description.vocab_size, files.description.eos_ids) == ("tiny", 4, (3,))
    assert files.num_bytes == sum(path.stat().st_size for path in parts)
    assert files.gguf is not None
    assert [name for name in files.gguf.tensors if "norm" in name] == [f"blk.{i}.attn_norm.weight" for i in range(4)]
    for layer in range(4):
        tensor = files.gguf.tensors[f"blk.{layer}.attn_norm.weight"]
        raw = tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
        assert np.frombuffer(raw, np.float32).tolist() == [layer] * 8


def test_a_whole_file_may_be_called_like_a_part_and_joined_parts_say_zero(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "tiny-00001-of-00002.gguf")
    assert read_model(path).description.id == "tiny-00001-of-00002"
    joined = make_gguf(tmp_path / "joined.gguf", uint16=("split.count", 0))
    assert read_model(joined).description.id == "joined"


def test_the_hash_knows_every_part_and_no_names(tmp_path: Path) -> None:
    first = read_model(split_gguf(tmp_path / "a.gguf")[0]).description.hash
    (tmp_path / "sub").mkdir()
    assert read_model(split_gguf(tmp_path / "sub" / "b.gguf")[0]).description.hash == first
    assert read_model(split_gguf(tmp_path / "c.gguf", split_max_tensors=3)[0]).description.hash != first
    last = split_gguf(tmp_path / "d.gguf")[-1]
    last.write_bytes(last.read_bytes() + bytes(32))
    assert read_model(last).description.hash != first


def test_what_does_not_belong_together_is_refused_by_name(tmp_path: Path) -> None:
    first, second, third = split_gguf(tmp_path / "tiny.gguf")
    good = {path: path.read_bytes() for path in (first, second, third)}
    words = {
        "split.no": (third, 1, f"{third}: split.no is 1, by its name it would be 2"),
        "split.count": (second, 4, f"{second}: a part of another model: split.count is 4, in {first.name} 3"),
        "split.tensors.count": (second, 9, f"{second}: a part of another model: split.tensors.count is 9"),
    }
    for key, (path, value, says) in words.items():
        change(path, key, value)
        assert says in refusal(first)
        path.write_bytes(good[path])
    for path in good:
        change(path, "split.tensors.count", 6)
    assert refusal(second) == f"{first}: split.tensors.count is 6, the 3 parts hold 5"
    for path in good:
        path.write_bytes(good[path].replace(b"blk.3.attn_norm.weight", b"blk.1.attn_norm.weight"))
    assert refusal(first) == f"{third}: tensor blk.1.attn_norm.weight is in {second.name} too"
    for path, raw in good.items():
        path.write_bytes(raw)
    third.write_bytes(good[third][:-1])
    assert f"{third}: truncated: tensor blk.3.attn_norm.weight" in refusal(first)
    third.write_bytes(good[third][:7])
    assert f"{third}: truncated or damaged" in refusal(first)
    shutil.copy(second, third)
    assert f"{third}: split.no is 1" in refusal(tmp_path)
    third.unlink()
    assert f"{third}: missing: the model of {first.name} has 3 parts" in refusal(first)
    second.unlink()
    assert f"{second}: missing, and 1 more of them" in refusal(tmp_path)


def test_a_part_that_lost_its_name_says_how_it_must_be_called(tmp_path: Path) -> None:
    _, second, _ = split_gguf(tmp_path / "tiny.gguf")
    lost = second.rename(tmp_path / "model.gguf")
    assert f"{lost}: split.no 1 of 3 parts" in refusal(lost) and "NAME-00001-of-00003.gguf" in refusal(lost)
    wrong = lost.rename(tmp_path / "tiny-00002-of-00004.gguf")
    assert refusal(wrong) == f"{wrong}: split.count is 3, its name says 4"


def test_two_models_in_a_folder_are_two_however_many_parts_they_have(tmp_path: Path) -> None:
    parts = split_gguf(tmp_path / "a.gguf")
    split_gguf(tmp_path / "b.gguf")
    assert "holds 2 GGUF files" in refusal(tmp_path)
    assert read_gguf(parts[1]).name == "a"


@pytest.mark.parametrize("value", ["many", True, -1, 1.5])
def test_a_count_that_is_none_is_refused(value: Any, tmp_path: Path) -> None:
    kind = {str: "string", bool: "bool", int: "int32", float: "float32"}[type(value)]
    path = make_gguf(tmp_path / "odd.gguf", **{kind: ("split.count", value)})
    assert f"{path}: split.count must be" in refusal(path)
