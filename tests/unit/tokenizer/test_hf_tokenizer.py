"""Tokenizers from a Hugging Face directory agree with transformers reading the same directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend

from common.errors import InvalidInput, ModelError, NotSupported
from common.model_files.describe import read_model
from scheduler_svc.assemble import assemble
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.tokenizer import Tokenizer, load_tokenizer
from tests.unit.model_files.test_describe import make_directory
from tests.unit.tokenizer.test_gguf_tokenizer import reference
from tests.unit.tokenizer.vocabularies import SPECIAL, TEXTS, piece_vocabulary

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message['role'] == 'odd' %}{{ raise_exception('odd role ' + message.role) }}{% endif %}\n"
    "<|start|>{{ message.role }}\n{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass
class Turn:
    role: str
    content: str


CHAT = [Turn("user", " Hi <|end|> there "), Turn("assistant", "Größe 🎉"), Turn("user", "{{ 1 }}")]


def as_dicts(chat: list[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in chat]


def pieces_reference() -> Any:
    tokens, kinds, _ = piece_vocabulary()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == 1}
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token in normal and token[:cut] in normal and token[cut:] in normal
    ]
    return transformers.LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)


def load(directory: Path) -> Tokenizer:
    make_directory(directory)
    tokenizer = load_tokenizer(read_model(directory))
    assert tokenizer is not None
    return tokenizer


def change_config(directory: Path, **values: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "pieces"])
@pytest.mark.parametrize("framed", [None, True, False])
def test_saved_tokenizers_agree_with_transformers(kind: str, framed: bool | None, tmp_path: Path) -> None:
    made = pieces_reference() if kind == "pieces" else reference(kind)
    made.chat_template = TEMPLATE
    made.bos_token = "<s>" if kind == "pieces" else SPECIAL[1]
    made.save_pretrained(tmp_path)
    if framed is not None:  # which tokenizer.json overrules
        change_config(tmp_path, add_bos_token=framed)
    ours = load(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for add_prompt in (True, False):
        text, ids = ours.encode_chat(CHAT, add_generation_prompt=add_prompt)
        options: dict[str, Any] = {"add_generation_prompt": add_prompt, "return_dict": False}
        assert text == theirs.apply_chat_template(as_dicts(CHAT), tokenize=False, **options)
        assert ids == theirs.apply_chat_template(as_dicts(CHAT), tokenize=True, **options)
        turns = len(CHAT) + add_prompt
        assert ids.count(made.bos_token_id) == (1 if kind == "pieces" else 1 + turns)  # there BOS begins turns too


def test_a_template_in_the_configuration_is_found(tmp_path: Path) -> None:
    reference("GPT2Tokenizer").save_pretrained(tmp_path)
    assert not load(tmp_path).has_chat_template
    with pytest.raises(NotSupported):
        load(tmp_path).apply_chat_template(CHAT)
    change_config(tmp_path, chat_template="old way")
    assert load(tmp_path).apply_chat_template(CHAT) == "old way"
    change_config(tmp_path, chat_template=[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}])
    assert load(tmp_path).apply_chat_template(CHAT) == "d"
    (tmp_path / "chat_template.jinja").write_text("new way")
    assert load(tmp_path).apply_chat_template(CHAT) == "new way"
    assert load(tmp_path).apply_chat_template(CHAT, template="the caller's") == "the caller's"


def test_a_template_that_is_none_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text and ids are served all the same."""
    reference("GPT2Tokenizer").save_pretrained(tmp_path)
    assert load(tmp_path).chat_template_problem() == ""
    change_config(tmp_path, chat_template="{% for message in messages %}{{ message.content }}")
    config = SchedulerConfig(model=str(tmp_path))
    parts = assemble(config)
    assert isinstance(parts.tokenizer, Tokenizer) and parts.tokenizer.encode("hello")
    assert f"{tmp_path}: not a chat template: " in caplog.text and "will be refused" in caplog.text
    with pytest.raises(InvalidInput, match="not a chat template"):
        parts.tokenizer.apply_chat_template(CHAT)
    caplog.clear()
    change_config(tmp_path, chat_template="well")
    assemble(config)
    assert not caplog.text


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    reference("GPT2Tokenizer").save_pretrained(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).decode(load(tmp_path).encode("a b c d e f")) == "a b c d e f"


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    reference("GPT2Tokenizer").save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="Unicode"):
        load(tmp_path).encode("a\ud800b")


def test_a_directory_without_tokenizer_serves_ids_alone(tmp_path: Path) -> None:
    make_directory(tmp_path)
    assert load_tokenizer(read_model(tmp_path)) is None


def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    make_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(read_model(tmp_path))
