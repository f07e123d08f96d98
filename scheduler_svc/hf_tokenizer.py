"""A tokenizer from a Hugging Face directory: tokenizer.json, and what tokenizer_config.json adds to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.errors import ModelError
from common.model_files.safetensors_header import read_json


def read_tokenizer(directory: Path) -> tuple[Tokenizer, Mapping[str, Any]] | None:
    """The tokenizer and its tokenizer_config.json ({} without one); None: the directory has no tokenizer.json.

    What is put around a text (BOS, EOS) is what tokenizer.json says; add_bos_token in tokenizer_config.json does not
    count beside it, as in transformers 5.

    Raises ModelError naming the file.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The tokenizers library raises bare Exception for whatever it can not read.
    except Exception as error:
        raise ModelError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    _add_missing(tokenizer, config)
    return tokenizer, config


def token_text(config: Mapping[str, Any], role: str) -> str | None:
    """How tokenizer_config.json spells a special token: a string, or an object with `content`."""
    token = config.get(role)
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _add_missing(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    known = tokenizer.get_added_tokens_decoder()
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if int(token_id) in known or not isinstance(entry, Mapping) or "content" not in entry:
            continue
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        token = AddedToken(str(entry["content"]), **flags)
        (tokenizer.add_special_tokens if flags["special"] else tokenizer.add_tokens)([token])
