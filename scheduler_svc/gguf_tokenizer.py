"""A tokenizer from the vocabulary in a GGUF file's metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> how text is cut before merging. Facts: llama.cpp's list of pre-tokenizers.
_GPT2_KINDS = frozenset({"", "default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-es", "jina-de"})
_DIGIT_KINDS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
_LLAMA3_KINDS = frozenset({"llama-bpe", "llama3", "llama-v3", "llama-v3.2", "falcon3", "pixtral", "dbrx", "smaug-bpe"})
_QWEN2_KINDS = frozenset({"qwen2", "deepseek-r1-qwen", "megrez"})
_TEKKEN_KINDS = frozenset({"tekken"})
_KINDS = _GPT2_KINDS | _DIGIT_KINDS | _LLAMA3_KINDS | _QWEN2_KINDS | _TEKKEN_KINDS
# Kinds that begin a text with BOS where the file does not say, and keep a word whole that the vocabulary has whole.
_WHOLE_WORD_KINDS = frozenset({"llama-bpe", "llama3", "llama-v3", "llama-v3.2", "falcon3", "pixtral", "tekken"})


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer a GGUF file describes; None: it describes none. Raises ModelError naming `source`."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or kind == "none" or not tokens:
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
    types = [int(value) for value in metadata.get("tokenizer.ggml.token_type", [])] or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    try:
        build = _byte_level if kind == "gpt2" else _sentencepiece
        tokenizer = build(metadata, tokens, types, source)
    except ModelError:
        raise
    # The tokenizers library raises bare Exception for an inconsistent vocabulary.
    except Exception as error:
        raise ModelError(f"{source}: the tokenizer can not be built: {error}") from error
    _add_tokens(tokenizer, tokens, types)
    _frame(tokenizer, metadata, tokens)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], source: str) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.pre", "")
    if kind not in _KINDS:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre {kind!r} is not supported (known: {', '.join(sorted(_KINDS - {''}))}); "
            "a Hugging Face directory of this model would be"
        )
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind in _WHOLE_WORD_KINDS))
    if kind in _QWEN2_KINDS:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cutter(kind)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _cutter(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind in _GPT2_KINDS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _DIGIT_KINDS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    pattern = _LLAMA3 if kind in _LLAMA3_KINDS else _QWEN2 if kind in _QWEN2_KINDS else _TEKKEN
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], source: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.scores is missing or has not one entry per token")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_by_score(tokens, types, scores)
    has_bytes = any(kind == _BYTE for kind in types)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    chain: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if prefix else chain)
    return tokenizer


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece scores highest; as BPE: every split of every piece, best
    piece first."""
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    ranked = []
    for index, token in enumerate(tokens):
        if types[index] != _NORMAL:
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


def _frame(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """BOS in front and EOS behind, as the file says; where it is silent, as the kind of vocabulary has it."""
    begins = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORD_KINDS
    frame: list[str] = ["$A"]
    named: list[tuple[str, int]] = []
    for role, default in (("bos", begins), ("eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        wanted = bool(metadata.get(f"tokenizer.ggml.add_{role}_token", default))
        if not wanted or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            continue
        named.append((tokens[token_id], token_id))
        frame = [tokens[token_id], *frame] if role == "bos" else [*frame, tokens[token_id]]
    if named:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frame, pair=[*frame, "$B"], special_tokens=named
        )
