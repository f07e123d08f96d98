"""Token ids to text, as they come: whole UTF-8 only, a bounded amount of work per token.

Every vocabulary served here is, in the end, a table from ids to bytes, and the text is the UTF-8 of the bytes joined.
So nothing is decoded twice, and pieces joined equal the whole by construction (windows of ids decoded again and again,
as is common, cost more and lose text at odd places).
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import ModelError
from common.messages import U32

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# No character is longer in UTF-8, so no more tokens than these can hold the beginning of one.
_LONGEST_CHARACTER = 4


def byte_alphabet() -> dict[str, int]:
    """The printable characters byte-level vocabularies spell bytes with. Source: GPT-2's encoder."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """How pieces become bytes. `space`: the character that stands for a space; `strip`: a text's first space is no part
    of it (the tokenizer put it there)."""

    byte_level: bool = False
    byte_fallback: bool = False
    space: str = ""
    strip: bool = False


def rules_from_json(decoder: Any, source: str) -> DecodeRules:
    """From the `decoder` of a tokenizer.json. Raises ModelError for a kind this module can not do in pieces."""
    steps = decoder.get("decoders", []) if _kind(decoder) == "Sequence" else [decoder]
    byte_level = byte_fallback = strip = False
    space = ""
    for step in steps:
        kind = _kind(step)
        if kind == "ByteLevel" and len(steps) == 1:
            byte_level = True
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Replace" and step.get("content") == " " and len(step["pattern"].get("String", "")) == 1:
            space = step["pattern"]["String"]
        elif kind == "Metaspace":
            space = step["replacement"]
            strip = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step.get("content") == " " and not step.get("stop"):
            strip = step.get("start") == 1
        elif kind != "Fuse":
            raise ModelError(f"{source}: decoder {kind} is not supported")
    return DecodeRules(byte_level, byte_fallback, space, strip)


def _kind(decoder: Any) -> str:
    return str(decoder.get("type")) if isinstance(decoder, Mapping) else "none"


class PieceTable:
    """Bytes of each id; filled as ids are seen. Shared by threads: a race only computes an entry twice."""

    def __init__(
        self,
        id_to_piece: Callable[[int], str | None],
        vocab_size: int,
        special_ids: frozenset[int],
        added_ids: frozenset[int],
        rules: DecodeRules,
    ) -> None:
        """`added_ids`: pieces that are spelled as they are, whatever the rules say of bytes."""
        self.rules = rules
        self.special_ids = special_ids
        self._id_to_piece = id_to_piece
        self._added_ids = added_ids
        self._alphabet = byte_alphabet()
        self._bytes: list[bytes | None] = [None] * vocab_size
        self._texts: list[str | None] = [None] * vocab_size
        self._cut: set[int] = set()  # ids whose bytes are no whole characters

    def get(self, token_id: int) -> bytes:
        """Empty for an id the vocabulary lacks (an embedding may have more rows than the vocabulary has entries)."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            piece = self._id_to_piece(token_id)
            known = b"" if piece is None else self._spell(token_id, piece)
            self._bytes[token_id] = known
        return known

    def text(self, token_id: int) -> str | None:
        """The id's text where its bytes are whole characters; None where the text depends on its neighbours."""
        if not 0 <= token_id < len(self._texts):
            return ""
        known = self._texts[token_id]
        if known is None and token_id not in self._cut:
            try:
                known = self._texts[token_id] = self.get(token_id).decode()
            except UnicodeDecodeError:
                self._cut.add(token_id)
        return known

    def _spell(self, token_id: int, piece: str) -> bytes:
        rules = self.rules
        if rules.byte_level:
            codes = [self._alphabet.get(character) for character in piece]
            spelled = [code for code in codes if code is not None]
            return bytes(spelled) if len(spelled) == len(codes) else piece.encode()
        if rules.byte_fallback and token_id not in self._added_ids:
            match = _BYTE_PIECE.fullmatch(piece)
            if match:
                return bytes([int(match[1], 16)])
        return (piece.replace(rules.space, " ") if rules.space else piece).encode()


class IncrementalDecoder:
    """One sequence's text. Not shared between threads.

    Bytes that can not become UTF-8 turn into U+FFFD, one for each maximal part, as soon as that is certain.
    """

    __slots__ = ("_pending", "_skip", "_strip", "_table", "_utf8")

    def __init__(
        self,
        table: PieceTable,
        *,
        skip_special: bool = True,
        prompt_ids: Sequence[int] | U32 = (),
    ) -> None:
        """`prompt_ids`: all that stands before. The text is what a decoder that had read them would go on with: a
        character may be cut in the middle, and after any text a first space is kept. Only their end is looked at."""
        self._table = table
        self._skip = table.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = False
        self._pending = False  # the beginning of a character is held back
        end = self._end_of(prompt_ids)
        self.push(end)
        self._strip = table.rules.strip and not end

    def _end_of(self, prompt_ids: Sequence[int] | U32) -> list[int]:
        """The last ids that stand for bytes, as many as can hold the beginning of a character; others are no text."""
        found: list[int] = []
        for token_id in map(int, reversed(prompt_ids)):
            if token_id not in self._skip and self._table.get(token_id):
                found.append(token_id)
                if len(found) == _LONGEST_CHARACTER:
                    break
        return found[::-1]

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with these tokens; may be empty. Ids unknown to the vocabulary have no text."""
        skip, get = self._skip, self._table.get
        if len(token_ids) == 1 and not self._pending and not self._strip and token_ids[0] not in skip:
            text = self._table.text(token_ids[0])
            if text is not None:
                return text
        text = self._utf8.decode(b"".join([get(i) for i in token_ids if i not in skip]))
        self._pending = bool(self._utf8.getstate()[0])
        return self._text(text)

    def flush(self) -> str:
        """What is still held back, at the end of the sequence: U+FFFD for an unfinished character."""
        self._pending = False
        return self._text(self._utf8.decode(b"", final=True))

    def _text(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
