"""Models by hub id, where the optional huggingface_hub is installed. Its own cache holds them."""

import importlib
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model_files.description import Progress, no_progress

# Weights as safetensors only, and what describes them; never pickled weights, never code.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Mistral's repositories hold all weights a second time, under names of their own that no loader here reads.
_LEFT_OUT = ["consolidated*.safetensors"]


def pull_from_hub(reference: str, progress: Progress = no_progress) -> Path:
    """Downloads `owner/name[@revision]` and returns its directory. Raises ModelError."""
    hub = _load(reference)
    progress(f"downloading {reference}", 0, 0)
    repository, _, revision = reference.partition("@")
    try:
        return Path(
            hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=_PATTERNS, ignore_patterns=_LEFT_OUT
            )
        )
    # Everything a network and a foreign library can raise ends in the same advice.
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{reference}: could not be fetched from the hub ({first}); "
            "give --model PATH: a Hugging Face directory or a GGUF file"
        ) from error


def find_on_disk(reference: str) -> Path | None:
    """The directory in huggingface_hub's cache, or None. Uses no network."""
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        return None
    repository, _, revision = reference.partition("@")
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):
        return None


def _load(reference: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelError(
            f"{reference}: no such path, and taken as a hub id it needs the package huggingface-hub, "
            "which is not installed; give --model PATH: a Hugging Face directory or a GGUF file"
        ) from None
