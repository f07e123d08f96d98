"""Frozen dataclasses to bytes and back, by their type annotations.

Both ends are the same checkout on one machine (`signature` makes sure), so no field carries a tag: a value's bytes
follow from its type. A field added to a message is encoded without a line here; a field of a new kind fails at import.

Integers: one length byte, then two's complement, little-endian. Floats: 8 bytes. Text, bytes, arrays and collections:
a uint32 count, then their content. Errors travel as their class in common.errors and their attributes.
"""

import dataclasses
import enum
import struct
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import common.errors as errors
from common.errors import ProtocolError, StepwireError

Put = Callable[[bytearray, Any], None]
Get = Callable[["Reader"], Any]

_COUNT: Final = struct.Struct("<I")
_FLOAT: Final = struct.Struct("<d")


class Reader:
    """Takes values off `data` from the front. Raises ProtocolError where it ends too early."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ProtocolError("a message between core and worker ends too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def count(self) -> int:
        return int(_COUNT.unpack(self.take(4))[0])

    def items(self) -> int:
        """A count of values of at least one byte each."""
        count = self.count()
        if count > len(self.data) - self.at:
            raise ProtocolError("a message between core and worker counts more values than it holds")
        return count


@cache
def codec_of(kind: Any) -> tuple[Put, Get]:
    """How values of the annotation `kind` are written and read. Raises TypeError for one that has no encoding."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(args[0])
    if origin is tuple:
        return _fixed(tuple(codec_of(arg) for arg in args), lambda values: values)
    if origin in (Mapping, dict):
        return _mapping(*args)
    if origin is types.UnionType and len(args) == 2 and args[1] is type(None):
        return _optional(args[0])
    if origin is np.ndarray:
        return _array(np.dtype(typing.get_args(args[1])[0]))
    if origin is NDArray:  # from NumPy 2.5 on it is an alias with a name of its own
        return _array(np.dtype(args[0]))
    if isinstance(kind, type) and issubclass(kind, enum.IntEnum):
        return _put_int, lambda reader: kind(_get_int(reader))
    if isinstance(kind, type) and issubclass(kind, StepwireError):
        return _put_error, _get_error
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        put_all, get_all = _fixed(tuple(codec_of(hints[name]) for name in names), lambda values: kind(*values))
        return lambda out, value: put_all(out, [getattr(value, name) for name in names]), get_all
    raise TypeError(f"no encoding for {kind}")


def signature(kind: Any) -> str:
    """Names and types of everything `codec_of(kind)` writes; equal signatures read each other's bytes."""
    if not dataclasses.is_dataclass(kind):
        inner = [signature(arg) for arg in typing.get_args(kind) if dataclasses.is_dataclass(arg)]
        return f"{kind}{inner or ''}"
    hints = typing.get_type_hints(kind)
    return f"{kind}({', '.join(f'{f.name}: {signature(hints[f.name])}' for f in dataclasses.fields(kind))})"


def _put_int(out: bytearray, value: int) -> None:
    size = (value.bit_length() + 8) // 8
    out.append(size)
    out += value.to_bytes(size, "little", signed=True)


def _get_int(reader: Reader) -> int:
    return int.from_bytes(reader.take(reader.take(1)[0]), "little", signed=True)


def _put_bytes(out: bytearray, value: bytes) -> None:
    out += _COUNT.pack(len(value))
    out += value


def _get_bytes(reader: Reader) -> bytes:
    return reader.take(reader.count())


def _get_text(reader: Reader) -> str:
    try:
        return _get_bytes(reader).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError("a message between core and worker holds text that is none") from error


_PLAIN: Final[dict[Any, tuple[Put, Get]]] = {
    int: (_put_int, _get_int),
    bool: (lambda out, value: out.append(value), lambda reader: reader.take(1) != b"\0"),
    float: (lambda out, value: out.extend(_FLOAT.pack(value)), lambda reader: _FLOAT.unpack(reader.take(8))[0]),
    bytes: (_put_bytes, _get_bytes),
    str: (lambda out, value: _put_bytes(out, value.encode("utf-8", "surrogatepass")), _get_text),
}


def _fixed(codecs: tuple[tuple[Put, Get], ...], make: Callable[[tuple[Any, ...]], Any]) -> tuple[Put, Get]:
    puts, gets = [put for put, _ in codecs], [get for _, get in codecs]

    def put_all(out: bytearray, values: Any) -> None:
        for put, value in zip(puts, values, strict=True):
            put(out, value)

    return put_all, lambda reader: make(tuple([get(reader) for get in gets]))


def _sequence(item: Any) -> tuple[Put, Get]:
    put_item, get_item = codec_of(item)

    def put(out: bytearray, values: Any) -> None:
        out += _COUNT.pack(len(values))
        for value in values:
            put_item(out, value)

    return put, lambda reader: tuple([get_item(reader) for _ in range(reader.items())])


def _mapping(key: Any, value: Any) -> tuple[Put, Get]:
    put_pairs, get_pairs = _sequence(tuple[key, value])
    return lambda out, mapping: put_pairs(out, mapping.items()), lambda reader: dict(get_pairs(reader))


def _optional(kind: Any) -> tuple[Put, Get]:
    put_value, get_value = codec_of(kind)

    def put(out: bytearray, value: Any) -> None:
        out.append(value is not None)
        if value is not None:
            put_value(out, value)

    return put, lambda reader: get_value(reader) if reader.take(1) != b"\0" else None


def _array(dtype: "np.dtype[Any]") -> tuple[Put, Get]:
    def put(out: bytearray, value: Any) -> None:
        out += _COUNT.pack(len(value))
        out += value.tobytes()

    # An array over immutable bytes is read-only, as columns of messages are.
    return put, lambda reader: np.frombuffer(reader.take(reader.count() * dtype.itemsize), dtype)


def _put_error(out: bytearray, error: StepwireError) -> None:
    known = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
    put_text = codec_of(str)[0]
    put_text(out, known.__name__)
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, int | str)}
    out.append(len(attributes))
    for name, value in attributes.items():
        put_text(out, name)
        out.append(isinstance(value, int))
        if isinstance(value, int):
            _put_int(out, value)
        else:
            put_text(out, value)


def _get_error(reader: Reader) -> StepwireError:
    kind: Any = getattr(errors, _get_text(reader), None)
    attributes: dict[str, Any] = {}
    for _ in range(reader.take(1)[0]):
        name = _get_text(reader)
        attributes[name] = _get_int(reader) if reader.take(1) != b"\0" else _get_text(reader)
    try:
        error = kind(attributes.pop("message"), **attributes)
    except (KeyError, TypeError) as cause:
        raise ProtocolError("a message between core and worker holds an error that is none") from cause
    if not isinstance(error, StepwireError):
        raise ProtocolError("a message between core and worker holds an error that is none")
    return error
