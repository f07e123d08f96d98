"""From a path on disk to a checked ModelFiles."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model_files.description import ModelDescription, ModelFiles, SamplingDefaults
from common.model_files.gguf_config import gguf_bos_id, gguf_config, gguf_eos_ids, gguf_sampling
from common.model_files.gguf_model import GgufModel, read_gguf
from common.model_files.gguf_parts import is_model, one_a_model
from common.model_files.safetensors_header import SafetensorsHeader, read_json, read_shards

_HASH_FORM = b"stepwire-model-1\n"


def read_model(path: Path, model_id: str = "", *, dummy: bool = False) -> ModelFiles:
    """`path`: a Hugging Face directory, a GGUF file, any part of a split one, or a directory holding exactly one GGUF
    file or the parts of one.

    `model_id`: the name to give it; default: the directory's or file's own. `dummy`: a directory whose config.json
    alone counts, whatever weights lie beside it. Reads headers only. Raises ModelError naming the file that is missing,
    truncated, mistyped or not a model.
    """
    if dummy:
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: random weights take their shapes from a config.json, and here is none")
        return _read_directory(path, model_id or path.resolve().name, dummy=True)
    if path.is_file():
        return _read_gguf(path, model_id)
    if not path.is_dir():
        raise ModelError(f"{path}: no such file or directory")
    ggufs = one_a_model(sorted(file.name for file in path.iterdir() if is_model(file.name)))
    # A folder of GGUF files may have the original's configuration too.
    if (path / "config.json").is_file() and not (ggufs and not any(path.glob("*.safetensors"))):
        return _read_directory(path, model_id or path.resolve().name)
    if len(ggufs) == 1:
        return _read_gguf(path / ggufs[0], model_id)
    if ggufs:
        raise ModelError(f"{path}: holds {len(ggufs)} GGUF files; name one of them: {', '.join(ggufs[:12])}")
    state = "an empty directory" if not any(path.iterdir()) else "no model: neither config.json nor a GGUF file in it"
    raise ModelError(f"{path}: {state}")


def _read_gguf(path: Path, model_id: str) -> ModelFiles:
    gguf = read_gguf(path)
    path, config = gguf.path, gguf_config(gguf)
    vocab_size = config["vocab_size"]
    description = ModelDescription(
        id=model_id or gguf.name,
        hash=_gguf_hash(gguf),
        architecture=config["architectures"][0],
        vocab_size=vocab_size,
        max_positions=_positive(config, "max_position_embeddings", path),
        eos_ids=gguf_eos_ids(gguf, vocab_size),
        bos_id=gguf_bos_id(gguf, vocab_size),
        default_sampling=_checked_sampling(gguf_sampling(gguf.metadata), path),
    )
    return ModelFiles(path, "gguf", description, config, gguf=gguf)


def _read_directory(path: Path, model_id: str, *, dummy: bool = False) -> ModelFiles:
    source = path / "config.json"
    config = read_json(source)
    shards = () if dummy else read_shards(path)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else config.get("model_type")
    if not isinstance(architecture, str):
        raise ModelError(f"{source}: architectures is missing")
    generation = _optional_json(path / "generation_config.json")
    tokenizer = _optional_json(path / "tokenizer_config.json")
    vocab_size = _positive(config, "vocab_size", source)
    ids = {*_ids(config, "eos_token_id", source), *_ids(generation, "eos_token_id", path / "generation_config.json")}
    special = _special_ids(path, tokenizer, ("eos_token", "eot_token"))
    ids.update(special.values())
    bos = next(iter(_ids(generation, "bos_token_id", source) or _ids(config, "bos_token_id", source)), None)
    description = ModelDescription(
        id=model_id,
        hash=_directory_hash(config, shards),
        architecture=architecture,
        vocab_size=vocab_size,
        max_positions=_positive(config, "max_position_embeddings", source),
        eos_ids=tuple(sorted(i for i in ids if 0 <= i < vocab_size)),
        bos_id=bos,
        default_sampling=_generation_sampling(generation, path / "generation_config.json"),
    )
    return ModelFiles(path, "dummy" if dummy else "safetensors", description, config, shards=shards)


def _gguf_hash(model: GgufModel) -> str:
    """Not over the files' names: a copy that is called otherwise is the same model."""
    digest = hashlib.sha256(_HASH_FORM)
    for part in model.parts:
        digest.update(f"gguf {part.size}\n".encode())
        with part.path.open("rb") as file:
            digest.update(file.read(part.data_offset))
    return digest.hexdigest()[:32]


def _directory_hash(config: Mapping[str, Any], shards: Iterable[SafetensorsHeader]) -> str:
    digest = hashlib.sha256(_HASH_FORM)
    digest.update(json.dumps(config, sort_keys=True, ensure_ascii=True).encode())
    for shard in shards:
        digest.update(f"\nsafetensors {shard.path.name} {shard.size}\n".encode())
        digest.update(shard.raw)
    return digest.hexdigest()[:32]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _positive(config: Mapping[str, Any], key: str, source: Path) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{source}: {key} must be a positive integer, not {value!r}")
    return value


def _ids(config: Mapping[str, Any], key: str, source: Path) -> list[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ModelError(f"{source}: {key} must be a token id or a list of them, not {value!r}")
    return values


def _special_ids(directory: Path, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Ids of tokens that tokenizer_config.json names by their text."""
    wanted = {}
    for name in names:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            wanted[name] = text
    if not wanted:
        return {}
    ids: dict[str, int] = {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids = {str(entry.get("content")): int(i) for i, entry in decoder.items() if isinstance(entry, dict)}
    if any(text not in ids for text in wanted.values()):
        added = _optional_json(directory / "tokenizer.json").get("added_tokens", [])
        ids |= {entry["content"]: entry["id"] for entry in added if isinstance(entry, dict)}
    return {name: ids[text] for name, text in wanted.items() if text in ids}


def _generation_sampling(generation: Mapping[str, Any], source: Path) -> SamplingDefaults:
    """Only what the file names. do_sample = false, where it is written, means greedy."""
    temperature = 0.0 if generation.get("do_sample") is False else generation.get("temperature")
    return _checked_sampling(
        SamplingDefaults(
            temperature=temperature,
            top_k=generation.get("top_k"),
            top_p=generation.get("top_p"),
            min_p=generation.get("min_p"),
            repetition_penalty=generation.get("repetition_penalty"),
        ),
        source,
    )


def _checked_sampling(sampling: SamplingDefaults, source: Path) -> SamplingDefaults:
    limits = {
        "temperature": (0, 100),
        "top_k": (0, 2**31),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (0, 10),
    }
    for name, (low, high) in limits.items():
        value = getattr(sampling, name)
        if value is None:
            continue
        good = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high:
            raise ModelError(f"{source}: {name} must be a number from {low} to {high}, not {value!r}")
    return sampling
