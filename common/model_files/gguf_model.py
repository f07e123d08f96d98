"""A model in GGUF: one file, or the parts of a split one, checked against each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model_files.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from common.model_files.gguf_parts import parse_part


@dataclass(frozen=True, slots=True, eq=False)
class GgufModel:
    """`parts`: the headers of all files, in order; the first has the metadata. `tensors`: those of all parts, by name;
    each knows its file."""

    parts: tuple[GgufHeader, ...]
    tensors: Mapping[str, GgufTensor]

    @property
    def path(self) -> Path:
        """The file that has the metadata."""
        return self.parts[0].path

    @property
    def name(self) -> str:
        """The file's name without its ending and without the part's number."""
        part = parse_part(self.path.name)
        return self.path.stem if part is None or len(self.parts) == 1 else part.stem

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.parts[0].metadata

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(part.size for part in self.parts)


def read_gguf(path: Path) -> GgufModel:
    """`path`: a file, or any part of a split one, beside which the others lie. Reads each file's header once.

    Raises ModelError naming the part that is missing, damaged, or not of this model.
    """
    header = read_gguf_header(path)
    count = _count(header, "split.count")
    if count <= 1:  # files that were joined again say 0
        return GgufModel((header,), header.tensors)
    parts = [header if own.name == path.name else read_gguf_header(own) for own in _paths(path, count, header.metadata)]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        _check_part(part, number, parts[0])
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelError(f"{part.path}: tensor {name} is in {tensors[name].path.name} too")
            tensors[name] = tensor
    total = _count(parts[0], "split.tensors.count")
    if total != len(tensors):
        raise ModelError(f"{parts[0].path}: split.tensors.count is {total}, the {count} parts hold {len(tensors)}")
    return GgufModel(tuple(parts), tensors)


def _paths(path: Path, count: int, metadata: Mapping[str, Any]) -> list[Path]:
    named = parse_part(path.name)
    if named is None:
        number = metadata.get("split.no")
        raise ModelError(
            f"{path}: split.no {number} of {count} parts, and not called so; the others are only found where each has "
            f"its name, as NAME-00001-of-{count:05d}.gguf (copy the folder, not one file)"
        )
    if named.count != count:
        raise ModelError(f"{path}: split.count is {count}, its name says {named.count}")
    found = [path.with_name(name) for name in named.names()]
    missing = [own for own in found if not own.exists()]
    if missing:
        more = f", and {len(missing) - 1} more of them" if len(missing) > 1 else ""
        raise ModelError(f"{missing[0]}: missing{more}: the model of {path.name} has {count} parts")
    return found


def _check_part(part: GgufHeader, number: int, first: GgufHeader) -> None:
    """`number`: from 0, as split.no has it."""
    if _count(part, "split.no") != number:
        found = part.metadata.get("split.no")
        raise ModelError(f"{part.path}: split.no is {found}, by its name it would be {number} (counted from 0)")
    for key in ("split.count", "split.tensors.count"):
        if _count(part, key) != _count(first, key):
            ours, theirs = part.metadata.get(key), first.metadata.get(key)
            raise ModelError(f"{part.path}: a part of another model: {key} is {ours}, in {first.path.name} {theirs}")


def _count(header: GgufHeader, key: str) -> int:
    """A file that does not have the key at all is not split: 0."""
    value = header.metadata.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{header.path}: {key} must be a number of parts or tensors, not {value!r}")
    return value
