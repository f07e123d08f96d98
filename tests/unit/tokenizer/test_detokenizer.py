"""Text in pieces: pieces joined are the whole, whatever the ids and wherever they are cut."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ModelError
from common.messages import u32
from scheduler_svc.detokenizer import byte_alphabet, rules_from_json
from scheduler_svc.tokenizer import Tokenizer
from tests.unit.tokenizer.test_gguf_tokenizer import load
from tests.unit.tokenizer.vocabularies import TEXTS, byte_level_metadata, piece_metadata

SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Beyond the vocabulary too, and far beyond.
IDS = st.lists(st.one_of(st.integers(0, 700), st.just(-1), st.just(2**32 - 1)), max_size=40)


@pytest.fixture(scope="module", params=["byte level", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    metadata = byte_level_metadata("gpt-2") if request.param == "byte level" else piece_metadata()
    return load(metadata, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(byte_level_metadata("gpt-2"), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(piece_metadata(), tmp_path_factory.mktemp("tokenizer"))


def cut(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    at = 0
    for size in sizes:
        yield ids[at : at + size]
        at += size
    yield ids[at:]


@SETTINGS
@given(ids=IDS, sizes=st.lists(st.integers(0, 5), max_size=20), skip=st.booleans())
def test_pieces_joined_are_the_whole(ids: list[int], sizes: list[int], skip: bool, tokenizer: Tokenizer) -> None:
    decoder = tokenizer.decoder(skip_special_tokens=skip)
    parts = [decoder.push(part) for part in cut(ids, sizes)]
    joined = "".join(parts) + decoder.flush()
    whole = tokenizer.decode(ids, skip)
    assert joined == whole
    joined.encode()  # whole characters only


@SETTINGS
@given(ids=st.lists(st.integers(0, 499), max_size=60), skip=st.booleans())
def test_byte_level_text_is_that_of_the_tokenizers_library(ids: list[int], skip: bool, byte_level: Tokenizer) -> None:
    assert byte_level.decode(ids, skip) == byte_level._backend.decode(ids, skip_special_tokens=skip)


def test_every_token_alone_is_what_the_tokenizers_library_says(byte_level: Tokenizer) -> None:
    for token_id in range(byte_level.vocab_size):
        assert byte_level.decode([token_id], False) == byte_level._backend.decode([token_id], skip_special_tokens=False)


def test_text_of_pieces_is_that_of_the_tokenizers_library(pieces: Tokenizer) -> None:
    for text in TEXTS:
        ids = pieces.encode(text)
        for skip in (True, False):
            assert pieces.decode(ids, skip) == pieces._backend.decode(ids, skip_special_tokens=skip)


# Mostly bytes, special tokens and ids without text: what a prompt's end and an output's beginning go wrong on.
TRICKY = st.lists(st.one_of(st.integers(0, 262), st.integers(0, 262), st.integers(-1, 700)), max_size=24)


@SETTINGS
@given(prompt=TRICKY, output=TRICKY, skip=st.booleans())
def test_a_completions_text_goes_on_where_the_prompts_ended(
    prompt: list[int], output: list[int], skip: bool, tokenizer: Tokenizer
) -> None:
    reader = tokenizer.decoder(skip_special_tokens=skip)
    reader.push(prompt)
    goes_on = reader.push(output) + reader.flush()
    for given_prompt in (prompt, u32([token_id % 2**32 for token_id in prompt])):
        decoder = tokenizer.decoder(given_prompt, skip)
        assert decoder.push(output) + decoder.flush() == goes_on


CLEF = "𝄞"  # four bytes the vocabularies have no longer piece for


def one_letter(tokenizer: Tokenizer) -> int:
    token_id = tokenizer._backend.token_to_id("a")
    assert token_id is not None
    return token_id


def test_a_character_over_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CLEF, add_special_tokens=False)[-4:]
    assert len(ids) == 4
    decoder = tokenizer.decoder()
    assert [decoder.push([token_id]) for token_id in ids] == ["", "", "", CLEF]
    assert decoder.flush() == ""


def test_an_unfinished_character_is_replaced_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CLEF, add_special_tokens=False)[-4:]
    decoder = tokenizer.decoder()
    assert decoder.push(ids[:2]) == ""
    assert decoder.flush() == "\ufffd"
    broken = tokenizer.decoder()
    assert broken.push(ids[:2]) == ""
    assert broken.push([one_letter(tokenizer)]) == "\ufffda"


def test_a_character_may_begin_in_the_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"ab {CLEF}", add_special_tokens=False)
    decoder = tokenizer.decoder(prompt_ids=ids[:-2])
    assert decoder.push(ids[-2:]) + decoder.flush() == CLEF


def test_a_completion_keeps_the_space_that_parts_it_from_the_prompt(pieces: Tokenizer) -> None:
    ids = pieces.encode("quick brown", add_special_tokens=False)
    words = pieces.encode("quick", add_special_tokens=False)
    assert ids[: len(words)] == words
    assert pieces.decoder(prompt_ids=words).push(ids[len(words) :]) == " brown"
    assert pieces.decode(ids) == "quick brown"


def test_after_a_prompt_without_text_a_text_begins(pieces: Tokenizer) -> None:
    """As `decode` of prompt and completion together says: the first space is the tokenizer's own."""
    word = pieces.encode("brown", add_special_tokens=False)
    bos = pieces.encode("")[:1] or [1]
    for prompt in (bos, bos * 9):
        assert pieces.decoder(prompt).push(word) == "brown" == pieces.decode([*prompt, *word])


def test_a_character_may_be_parted_by_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CLEF, add_special_tokens=False)[-4:]
    decoder = tokenizer.decoder([*ids[:2], 1, 2, 1, 2, 1, 2])
    assert decoder.push(ids[2:]) == CLEF


def test_special_tokens_are_hidden_or_spelled(tokenizer: Tokenizer) -> None:
    ids = [1, one_letter(tokenizer), 2]
    assert tokenizer.decode(ids) == "a"
    spelled = tokenizer.decode(ids, skip_special_tokens=False)
    assert spelled == f"{tokenizer.id_to_piece(1)}a{tokenizer.id_to_piece(2)}"


def test_ids_the_vocabulary_lacks_have_neither_text_nor_piece(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size, 2**40):
        assert tokenizer.decode([token_id]) == ""
        assert tokenizer.id_to_piece(token_id) == ""


def test_the_alphabet_spells_every_byte_once() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize(
    "decoder",
    [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}],
)
def test_a_decoder_of_another_kind_is_refused_by_name(decoder: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder"):
        rules_from_json(decoder, "tokenizer.json")
