"""A tokenizer from the vocabulary in a GGUF file's metadata."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from common.errors import ModelError
from common.model_files.gguf_values import GgufValues
from scheduler_svc.gguf_cuts import NORMALISED, WHOLE_WORDS, cutter, kind_of

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"
_BYTES = re.compile(r"<0x[0-9A-F]{2}>")


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer a GGUF file describes; None: it describes none. Raises ModelError naming `source`."""
    values = GgufValues(metadata, source)
    kind, tokens = values.text("tokenizer.ggml.model"), values.texts("tokenizer.ggml.tokens")
    if kind in (None, "none", "no_vocab") or not tokens:
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
    types = values.numbers("tokenizer.ggml.token_type") or _types(values, tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    cut = kind_of(values, source) if kind == "gpt2" else ""
    try:
        tokenizer = _byte_level(values, tokens, cut, source) if cut else _sentencepiece(values, tokens, types, source)
    except ModelError:
        raise
    # The tokenizers library raises bare Exception for an inconsistent vocabulary.
    except Exception as error:
        raise ModelError(f"{source}: the tokenizer can not be built: {error}") from error
    _add_tokens(tokenizer, tokens, types)
    _frame(tokenizer, values, tokens, begins=not cut or cut in WHOLE_WORDS)
    return tokenizer


def _types(values: GgufValues, tokens: Sequence[str]) -> list[int]:
    """For a file that does not say: what is named as special or spelled as a byte, and text."""
    types = [_BYTE if _BYTES.fullmatch(token) else _NORMAL for token in tokens]
    for role, kind in (("unknown", _UNKNOWN), ("bos", _CONTROL), ("eos", _CONTROL), ("eot", _CONTROL)):
        token_id = values.whole(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            types[token_id] = kind
    return types


def _byte_level(values: GgufValues, tokens: Sequence[str], cut: str, source: str) -> Tokenizer:
    merges = [_pair(merge) for merge in values.texts("tokenizer.ggml.merges")]
    if not merges:
        raise ModelError(f"{source}: tokenizer.ggml.merges is missing: text could only be cut into bytes")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut in WHOLE_WORDS))
    if cut in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cutter(cut)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(values: GgufValues, tokens: Sequence[str], types: Sequence[int], source: str) -> Tokenizer:
    scores = values.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.scores is missing or has not one entry per token")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_by_score(tokens, types, scores)
    has_bytes = any(kind == _BYTE for kind in types) or all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    prefix = values.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    chain: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if prefix else chain)
    return tokenizer


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece scores highest; as BPE: every split of every piece, best
    piece first."""
    # Runs of spaces are often user-defined: matched by themselves they would not be, since texts have no "▁".
    joined = (_NORMAL, _USER_DEFINED)
    known = {token for token, kind in zip(tokens, types, strict=True) if kind in joined}
    ranked = []
    for index, token in enumerate(tokens):
        if types[index] not in joined:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                ranked.append((-float(scores[index]), index, cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    spelled = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in spelled])


def _frame(tokenizer: Tokenizer, values: GgufValues, tokens: Sequence[str], *, begins: bool) -> None:
    """BOS in front and EOS behind, as the file says; where it is silent, BOS if the kind of vocabulary `begins` so."""
    frame: list[str] = ["$A"]
    named: list[tuple[str, int]] = []
    for role, default in (("bos", begins), ("eos", False)):
        token_id = values.whole(f"tokenizer.ggml.{role}_token_id")
        wanted = values.flag(f"tokenizer.ggml.add_{role}_token", default)
        if not wanted or token_id is None or not 0 <= token_id < len(tokens):
            continue
        named.append((tokens[token_id], token_id))
        frame = [tokens[token_id], *frame] if role == "bos" else [*frame, tokens[token_id]]
    if named:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frame, pair=[*frame, "$B"], special_tokens=named
        )
