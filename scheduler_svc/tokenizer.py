"""Text to token ids and back, for the model served. No torch, no transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from common.errors import InvalidInput, ModelError, NotSupported
from common.messages import U32
from common.model_files.description import ModelFiles
from common.model_files.gguf_values import GgufValues
from common.model_files.safetensors_header import read_json
from scheduler_svc.chat_template import ChatTemplate
from scheduler_svc.detokenizer import DecodeRules, IncrementalDecoder, PieceTable, rules_from_json
from scheduler_svc.gguf_tokenizer import build_tokenizer
from scheduler_svc.hf_tokenizer import read_tokenizer, token_text

_OWN_TEMPLATE = "chat.messages"  # what errors of the model's own template are about: the caller chose only those
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class ChatTurn(Protocol):
    """One message of a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class Tokenizer:
    """Called from several threads; stateless but for the decoders it makes.

    `vocab_size`: one more than the largest id with a piece; the model's own vocabulary may be larger.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        rules: DecodeRules,
        *,
        special_tokens: dict[str, str],
        chat_template: str | None = None,
    ) -> None:
        """`special_tokens`: role (bos_token, …) to text, for chat templates."""
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self._backend = backend
        self._table = PieceTable(backend.id_to_token, self.vocab_size, self.special_ids, frozenset(added), rules)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def chat_template_problem(self) -> str:
        """Why the model's own chat template can not be used, as far as compiling it shows; empty: it can, or there is
        none."""
        try:
            if self.chat_template is not None:
                ChatTemplate(self.chat_template, _OWN_TEMPLATE)
        except InvalidInput as error:
            return error.message
        return ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens spelled out in `text` become themselves; `add_special_tokens` adds BOS and EOS as
        the model wants them. Raises InvalidInput for text that is not Unicode (lone surrogates)."""
        try:
            # As a batch, because that lets other threads run meanwhile; `encode` of a long text holds them all up.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput("the text is not valid Unicode", field="text") from error
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids the vocabulary lacks have no text."""
        decoder = IncrementalDecoder(self._table, skip_special=skip_special_tokens)
        return decoder.push(token_ids) + decoder.flush()

    def id_to_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling; "" for an id it lacks."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._backend.id_to_token(token_id) or ""

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """`id_to_piece` of each."""
        return [self.id_to_piece(token_id) for token_id in token_ids]

    def decoder(self, prompt_ids: Sequence[int] | U32 = (), skip_special_tokens: bool = True) -> IncrementalDecoder:
        """For a completion: its text goes on where that of the whole prompt ended."""
        return IncrementalDecoder(self._table, skip_special=skip_special_tokens, prompt_ids=prompt_ids)

    def apply_chat_template(
        self, messages: Sequence[ChatTurn], template: str = "", add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text, special tokens spelled out: encode it with add_special_tokens=False.

        `template`: Jinja; empty: the model's own. Raises InvalidInput when the template fails or refuses, NotSupported
        when there is none.
        """
        if template:
            chosen = ChatTemplate(template)
        elif self.chat_template is not None:
            chosen = ChatTemplate(self.chat_template, _OWN_TEMPLATE)
        else:
            raise NotSupported("the model has no chat template; send one, or send text", field="chat.template")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return chosen.render(
            turns,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **self.special_tokens,
        )

    def files(self) -> dict[str, bytes]:
        """The tokenizer as Hugging Face's files by name, for a gateway that tokenises itself. Costs a second or so."""
        config = {**self.special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return {
            "tokenizer.json": self._backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False).encode(),
        }

    def encode_chat(
        self, messages: Sequence[ChatTurn], template: str = "", add_generation_prompt: bool = True
    ) -> tuple[str, list[int]]:
        """The conversation as text and as ids. No BOS is added: the template writes its own."""
        text = self.apply_chat_template(messages, template, add_generation_prompt)
        return text, self.encode(text, add_special_tokens=False)


def load_tokenizer(files: ModelFiles) -> Tokenizer | None:
    """The model's tokenizer; None: its files have none, and only token ids can be served.

    Raises ModelError naming the file that is damaged or not supported.
    """
    return _from_gguf(files) if files.gguf is not None else _from_directory(files.path)


def _from_gguf(files: ModelFiles) -> Tokenizer | None:
    assert files.gguf is not None
    values = GgufValues(files.gguf.metadata, files.path)
    backend = build_tokenizer(files.gguf.metadata, str(files.path))
    if backend is None:
        return None
    byte_level = values.text("tokenizer.ggml.model") == "gpt2"
    prefix = values.flag("tokenizer.ggml.add_space_prefix", True)
    rules = DecodeRules(byte_level=True) if byte_level else DecodeRules(False, True, "▁", prefix)
    special: dict[str, str] = {}
    for role, name in _GGUF_ROLES.items():
        token_id = values.whole(f"tokenizer.ggml.{name}_token_id")
        text = backend.id_to_token(token_id) if token_id is not None and 0 <= token_id < 1 << 32 else None
        if text is not None:
            special[role] = text
    return Tokenizer(backend, rules, special_tokens=special, chat_template=values.text("tokenizer.chat_template"))


def _from_directory(directory: Path) -> Tokenizer | None:
    found = read_tokenizer(directory)
    if found is None:
        return None
    backend, config = found
    path = directory / "tokenizer.json"
    rules = rules_from_json(read_json(path).get("decoder"), str(path))
    special = {role: text for role in _ROLES if (text := token_text(config, role)) is not None}
    return Tokenizer(
        backend,
        rules,
        special_tokens=special,
        chat_template=_directory_template(directory, config.get("chat_template")),
    )


def _directory_template(directory: Path, configured: Any) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, which may name several; then the one called "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: can not be read: {error}") from error
    if isinstance(configured, str):
        return configured
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        template = named.get("default")
        return template if isinstance(template, str) else None
    return None
