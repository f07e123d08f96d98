"""The default model's tokenizer, from its GGUF file."""

import random
from dataclasses import dataclass

import pytest

from scheduler_svc.tokenizer import Tokenizer, load_tokenizer
from tests.reference import default_files
from tests.unit.tokenizer.vocabularies import TEXTS

pytestmark = pytest.mark.model


@dataclass
class Turn:
    role: str
    content: str


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(default_files())
    assert tokenizer is not None
    return tokenizer


# Ids as llama.cpp (xllamacpp 2026.10) gives them for the same file.
KNOWN = {
    "Hello world": [19556, 905],
    "1234 numbers 5": [33, 34, 35, 36, 2966, 216, 37],
    "  a\n\n b\t": [216, 253, 1116, 278, 197],
    "def f(x):\n    return x**2": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    "don't I'LL": [12420, 982, 339, 23, 16421],
}


@pytest.mark.parametrize("text", KNOWN)
def test_known_texts_have_known_ids(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text) == KNOWN[text]


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_token_and_random_sequences_decode_as_the_tokenizers_library_does(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.decode([token_id], False) == tokenizer._backend.decode([token_id], skip_special_tokens=False)
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(30)]
        decoder = tokenizer.decoder()
        pieces = "".join(decoder.push([token_id]) for token_id in ids) + decoder.flush()
        assert pieces == tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


def test_a_chat_is_written_as_the_model_learned_it(tokenizer: Tokenizer) -> None:
    text, ids = tokenizer.encode_chat([Turn("user", "Hi")])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    own, _ = tokenizer.encode_chat([Turn("system", "Be brief."), Turn("user", "Hi")], add_generation_prompt=False)
    assert own == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_the_description_fits_the_tokenizer(tokenizer: Tokenizer) -> None:
    description = default_files().description
    assert description.vocab_size == tokenizer.vocab_size == 49152
    assert description.eos_ids == (0, 2) and description.max_positions == 8192  # end of text, end of a turn
