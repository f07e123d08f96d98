"""How byte-level vocabularies cut a text before merging, by the name a GGUF file gives to the manner
(tokenizer.ggml.pre). The patterns are the models' own; the names are llama.cpp's."""

import logging
from collections.abc import Mapping, Sequence

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from common.errors import ModelError
from common.model_files.gguf_values import GgufValues

log = logging.getLogger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(end: str, digits: str) -> str:
    """Words in capitals apart from those that go on in small letters; `end`: what may follow either."""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{end}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_TEKKEN, _GPT4O = _cased("", r"\p{N}"), _cased(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}")
# Letters with a case, but for those of newer Unicode than DeepSeek's first vocabularies, and mathematical ones.
_NEWER = (
    r"\u0560-\u0588\u10C7\u10CD\u10D0-\u10FF\u1C80-\u1C8F\u2D00-\u2D2F\uA790-\uA7FF\uAB30-\uAB6F"
    r"\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}"
)
_CASED = rf"[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_NEWER}]]"
_CJK = r"[一-龥ࠀ-一가-\uD7FF]+"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
)

_GPT2 = frozenset({"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "a.x-4.0", "mellum", "trillion"})
_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
# These begin a text with BOS where the file does not say, and keep a word whole that the vocabulary has whole.
_LLAMA3_OWN = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "llama-v3.2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"}
)
WHOLE_WORDS = _LLAMA3_OWN | {"tekken"}
NORMALISED = frozenset({"qwen2", "deepseek-r1-qwen", "megrez", "kormo"})
_PATTERNS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys((*_LLAMA3_OWN, "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(NORMALISED, (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "tekken": (_TEKKEN,),
    "seed-coder": (_SEED,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
_ONE_DIGIT_LAST = frozenset({"deepseek-llm", "deepseek-coder"})
_BY_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}


def kind_of(values: GgufValues, source: str) -> str:
    """The manner's name; where the file does not say, as old ones, the usual one of its architecture and vocabulary.

    Raises ModelError for one that is not known.
    """
    kind = values.text("tokenizer.ggml.pre") or "default"
    if kind == "default":
        llama3 = "<|begin_of_text|>" in values.texts("tokenizer.ggml.tokens")
        kind = _BY_ARCHITECTURE.get(values.text("general.architecture") or "", "llama-bpe" if llama3 else "gpt-2")
        log.warning("%s does not say how it cuts text (tokenizer.ggml.pre): taken as %s", source, kind)
    known = {*_GPT2, *_DIGITS, *_PATTERNS}
    if kind not in known:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre {kind!r} is not supported (known: {', '.join(sorted(known))}); "
            "a Hugging Face directory of this model would be"
        )
    return kind


def cutter(kind: str) -> PreTokenizer:
    """`kind`: as `kind_of` has it."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _GPT2:
        return words
    if kind in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    cuts: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[kind]
    ]
    if kind in _ONE_DIGIT_LAST:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
