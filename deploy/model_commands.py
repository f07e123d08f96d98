"""What `stepwire models` does."""

from common.errors import ModelError
from common.model_files.catalog import list_models, model_path, pull
from deploy.progress import ProgressLine
from deploy.terminal import print_json


def pull_model(reference: str, as_json: bool) -> None:
    """Fetches the model unless it is there; progress on standard error, the path on standard output."""
    progress = ProgressLine()
    try:
        path = pull(reference, progress)
    finally:
        progress.done()
    if as_json:
        print_json({"model": reference or "default", "path": str(path)})
    else:
        print(path)


def list_all(as_json: bool) -> None:
    found = list_models()
    if as_json:
        print_json(
            [
                {
                    "id": model.id,
                    "path": str(model.path) if model.path else None,
                    "bytes": model.num_bytes,
                    "default": model.is_default,
                }
                for model in found
            ]
        )
        return
    names = [model.id + (" (default)" if model.is_default else "") for model in found]
    for name, model in zip(names, found, strict=True):
        where = model.path or "not here; fetch it with: stepwire models pull"
        print(f"{name:<{max(map(len, names))}}  {model.num_bytes / 1e6:>9,.1f} MB  {where}")


def print_path(reference: str, as_json: bool) -> None:
    path = model_path(reference)
    if path is None:
        name = reference or "the default model"
        raise ModelError(f"{name} is not on this machine; fetch it with: stepwire models pull {reference}".rstrip())
    if as_json:
        print_json({"model": reference or "default", "path": str(path)})
    else:
        print(path)
