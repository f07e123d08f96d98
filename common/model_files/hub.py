"""Models by hub id, where the optional huggingface_hub is installed. Its own cache holds them.

The library finds the endpoint (HF_ENDPOINT), the token (HF_TOKEN), proxies and its cache (HF_HOME) itself; a connection
that breaks off is taken up again where it stopped, and a file that is complete is not fetched twice.
"""

import glob
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from common.errors import ModelError
from common.model_files.description import Progress, no_progress
from common.model_files.hub_names import HubName, needed_files

_INSTEAD: Final = "; or give --model PATH: a Hugging Face directory or a GGUF file"
_ANSWER_S: Final = 15.0  # for a hub's first answer; while files load, the library's own HF_HUB_DOWNLOAD_TIMEOUT holds
_POLL_S: Final = 0.25


def pull_from_hub(name: HubName, progress: Progress = no_progress) -> Path:
    """Downloads what `name` needs and returns its directory or GGUF file. Raises ModelError.

    Where the hub can not be asked (no network, HF_HUB_OFFLINE), what was pulled earlier is used.
    """
    hub = _load(name)
    progress(f"asking the hub for {name.reference}", 0, 0)
    try:
        info = hub.HfApi().model_info(name.repository, revision=name.revision, timeout=_ANSWER_S, files_metadata=True)
    # Whatever a network and a foreign library can raise.
    except Exception as error:
        failure = _failure(hub, name, error)
        found = None if isinstance(error, hub.errors.RevisionNotFoundError) else find_on_disk(name)
        if found is None:
            raise failure from error
        progress(f"{failure.message}\n  using {found}", 0, 0)
        return found
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    files = needed_files(name, sizes)
    missing = [file for file in files if not _is_cached(hub, name, file, info.sha)]
    total = sum(sizes[file] for file in missing)
    download = _Download(hub, name, files)

    def report(done: int) -> None:
        if missing:
            progress(f"downloading {name.reference}", min(done, total), total)

    try:
        folder = download.run(report)
    except Exception as error:
        raise _failure(hub, name, error) from error
    return _target(folder, files)


def find_on_disk(name: HubName) -> Path | None:
    """The directory or GGUF file in huggingface_hub's cache, complete, or None. Uses no network."""
    try:
        hub = _import()
    except ImportError:
        return None
    options: dict[str, Any] = {"revision": name.revision, "local_files_only": True}
    try:
        # No file matches: the folder alone is asked for, whatever of the repository is in it.
        folder = Path(hub.snapshot_download(name.repository, **options, allow_patterns=["/"]))
        try:
            present = [file.path for file in hub.get_cached_repo_tree(name.repository, revision=name.revision)]
        except hub.errors.CachedRepoTreeNotFoundError:
            present = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        files = needed_files(name, present)
    except (OSError, ValueError, ModelError):
        return None
    return _target(folder, files) if all((folder / file).is_file() for file in files) else None


class _Stopped(Exception):
    """Raised in the library's threads once nobody waits for them."""


class _Download:
    """One snapshot_download in a thread of its own, so that Ctrl-C does not wait for gigabytes.

    The library tells a progress bar of the caller's class what arrives; here one that only counts and, once nobody
    waits any more, raises.
    """

    def __init__(self, hub: Any, name: HubName, files: tuple[str, ...]) -> None:
        self._hub, self._name, self._files = hub, name, files
        self._bars: list[Any] = []
        self._stop = threading.Event()

    def run(self, report: Callable[[int], None]) -> Path:
        """The snapshot's directory. `report` is called from this thread with the bytes that have arrived. Raises what
        the library does."""
        pool = ThreadPoolExecutor(1, "hub")
        try:
            loading = pool.submit(
                self._hub.snapshot_download,
                self._name.repository,
                revision=self._name.revision,
                allow_patterns=[glob.escape(file) for file in self._files],
                tqdm_class=self._bar_class(),
            )
            while not wait((loading,), _POLL_S).done:
                report(self._received())
            report(self._received())
            return Path(loading.result())
        finally:
            self._stop.set()
            pool.shutdown(wait=False)

    def _received(self) -> int:
        return int(max((bar.n for bar in self._bars), default=0))

    def _bar_class(self) -> Any:
        bars, stop = self._bars, self._stop
        base: Any = self._hub.utils.tqdm

        class Bar(base):  # type: ignore[misc]  # the library is optional
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})
                if options.get("unit") == "B":  # others count files
                    bars.append(self)

            def update(self, n: float | None = 1) -> None:
                if stop.is_set():
                    raise _Stopped
                with self.get_lock():
                    self.n += n or 0

        return Bar


def _is_cached(hub: Any, name: HubName, file: str, commit: str) -> bool:
    return isinstance(hub.try_to_load_from_cache(name.repository, file, revision=commit), str)


def _target(folder: Path, files: tuple[str, ...]) -> Path:
    return folder / files[0] if files[0].lower().endswith(".gguf") else folder


def _failure(hub: Any, name: HubName, error: Exception) -> ModelError:
    """Says what is wrong in terms of what the user wrote, and what to do."""
    if isinstance(error, ModelError):
        return error
    kinds = hub.errors
    if isinstance(error, kinds.GatedRepoError):
        cause = f"{name.repository} is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
    elif isinstance(error, kinds.RepositoryNotFoundError):
        cause = f"the hub has no {name.repository}, or it is private and HF_TOKEN gives no access to it"
    elif isinstance(error, kinds.RevisionNotFoundError):
        cause = f"{name.repository} has no branch, tag or commit {name.revision}"
    elif isinstance(error, kinds.OfflineModeIsEnabled):
        cause = "HF_HUB_OFFLINE is set and it was not pulled before"
    else:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        cause = f"could not be fetched from the hub ({first})"
    return ModelError(f"{name.reference}: {cause}{_INSTEAD}")


def _import() -> Any:
    """The library, with those of its modules in place that it does not load by itself."""
    hub = importlib.import_module("huggingface_hub")
    for part in ("errors", "utils"):
        importlib.import_module(f"huggingface_hub.{part}")
    return hub


def _load(name: HubName) -> Any:
    try:
        return _import()
    except ImportError:
        raise ModelError(
            f"{name.reference}: no such path, and taken as a hub id it needs the package huggingface-hub, "
            f"which is not installed{_INSTEAD}"
        ) from None
