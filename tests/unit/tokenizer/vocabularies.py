"""Small vocabularies trained here, and the metadata with which GGUF files carry them."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

SAMPLE = [
    "The quick brown fox jumps over the lazy dog; it's 12345 o'clock, isn't it?",
    "def add(a, b):\n    return a + b  # 3.14159\n\n\n",
    "Größe, naïve café — “quoted” … 100 % 日本語のテキスト 東京は大きい",
    "emoji 🎉👩‍👩‍👧 and   several    spaces\tand tabs\r\n",
    "Numbers 1 22 333 4444 55555 and CamelCaseWords IN CAPITALS they'LL We'Re",
]
SPECIAL = ["<|endoftext|>", "<|start|>", "<|end|>"]
TEXTS = [
    *SAMPLE,
    "",
    " ",
    "   leading",
    "trailing   ",
    "\n\n \n",
    "a",
    "12345678 9",
    "it's they'LL I'D don't",
    "x" * 50,
    "🎉👩‍👩‍👧🎉",
    "e\u0301 and \u00e9",
    "日本語 テキスト。",
    "<|start|>user\nhello<|end|>\n<|start|>",
    " <|end|> a <|end|>b",
    "def f(x):\n\treturn x**2 != 4\n",
    "\u200bzero\u00a0width ﬁ ½ ²",
    "…—“” ¿qué? Привет мир العربية",
    "\x00\x01 control \x7f",
    "<s> a</s>b <|user|>hello <|user|> world",
]


@cache
def byte_level_vocabulary() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(tokens by id, merges): SPECIAL first, then 256 bytes, then merges of SAMPLE."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(SAMPLE * 3, trainer)
    by_id = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    model = trained.to_str()
    merges = _merges(model)
    return tuple(token for token, _ in by_id), merges


def _merges(serialised: str) -> tuple[tuple[str, str], ...]:
    return tuple((left, right) for left, right in json.loads(serialised)["model"]["merges"])


def byte_level_metadata(pre: str, **more: Any) -> dict[str, Any]:
    """tokenizer.ggml.* of the byte-level vocabulary."""
    tokens, merges = byte_level_vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@cache
def piece_vocabulary() -> tuple[tuple[str, ...], tuple[int, ...], tuple[float, ...]]:
    """(pieces, types, scores) of a SentencePiece vocabulary with bytes: all prefixes of words, longer ones later."""
    # Without the party popper, which must then be spelled in bytes.
    words = sorted({f"▁{word}" for text in SAMPLE for word in text.split() if "🎉" not in word})
    pieces: dict[str, None] = {}
    for length in range(2, 9):
        for word in words:
            if len(word) >= length:
                pieces.setdefault(word[:length])
    letters = sorted({letter for word in words for letter in word})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>", *pieces, *letters]
    kinds = [2, 3, 3, *[6] * 256, 4, *[1] * (len(pieces) + len(letters))]
    first = 3 + 256 + 1
    scores = [0.0] * first + [-float(index) for index in range(len(tokens) - first)]
    return tuple(tokens), tuple(kinds), tuple(scores)


def piece_metadata(**more: Any) -> dict[str, Any]:
    """tokenizer.ggml.* of the SentencePiece vocabulary."""
    tokens, kinds, scores = piece_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
