"""Models by hub id: the real huggingface_hub against a stand-in for the hub, on loopback."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import _tree_cache, constants

from common.errors import ModelError
from common.model_files import catalog
from tests.fakes.hub_server import Hub, commit_of, serving_hub
from tests.unit.model_files.test_describe import make_directory, make_gguf
from tests.unit.model_files.test_gguf_model import split_gguf

NAME = "tiny/llama"
NEEDED = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model's directory, and beside it what must not be fetched."""
    directory = tmp_path / "repository"
    (directory / "onnx").mkdir(parents=True)
    make_directory(directory, tokenizer={"added_tokens": []}, tokenizer_config={"eos_token": "</s>"})
    for name in ("pytorch_model.bin", "README.md", "modeling.py", "onnx/model.onnx", "consolidated.safetensors"):
        (directory / name).write_bytes(b"not wanted")
    return directory


@pytest.fixture
def served(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """`tiny/llama` on a hub that this process's huggingface_hub asks, and an empty cache."""
    with serving_hub() as server:
        server.add(NAME, repository)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        huggingface_hub.close_session()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_only_what_is_needed_is_fetched_and_only_once(served: Hub) -> None:
    assert catalog.model_path(NAME) is None
    seen: list[tuple[str, int, int]] = []
    path = catalog.pull(NAME, lambda *step: seen.append(step))
    assert sorted(file.name for file in path.iterdir()) == NEEDED == sorted(served.fetched())
    total = sum((path / name).stat().st_size for name in NEEDED)
    assert seen[0] == (f"asking the hub for {NAME}", 0, 0) and seen[-1] == (f"downloading {NAME}", total, total)
    assert catalog.model_path(NAME) == path
    assert catalog.pull(NAME) == path and len(served.fetched()) == len(NEEDED)
    files = catalog.resolve(NAME)
    assert files.description.id == NAME and files.kind == "safetensors"


def test_a_revision_is_pinned(served: Hub, repository: Path) -> None:
    (repository / "config.json").write_text((repository / "config.json").read_text().replace("100", "101"))
    served.add(NAME, repository, "v2")
    commit = commit_of(NAME + "v2")
    by_tag, by_commit = catalog.resolve(f"{NAME}@v2"), catalog.resolve(f"{NAME}@{commit}")
    assert by_tag.path == by_commit.path and by_tag.path.name == commit
    assert by_tag.description.vocab_size == 101 and catalog.resolve(NAME).description.vocab_size == 100
    with pytest.raises(ModelError, match=rf"{NAME}@v3: {NAME} has no branch, tag or commit v3; .*--model PATH"):
        catalog.pull(f"{NAME}@v3")


def test_a_gguf_file_of_a_repository(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "ggufs"
    directory.mkdir()
    for quantisation in ("Q4_K_M", "Q8_0"):
        make_gguf(directory / f"tiny-{quantisation}.gguf", name=quantisation)
    served.add("tiny/gguf", directory)
    usual, other = catalog.resolve("tiny/gguf"), catalog.resolve("tiny/gguf:q8_0")
    assert (usual.path.name, other.path.name) == ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    assert (usual.description.id, other.description.id) == ("tiny/gguf", "tiny/gguf:q8_0")
    assert served.fetched() == ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"]
    offline(monkeypatch)
    assert catalog.pull("tiny/gguf:tiny-Q8_0.gguf") == other.path == catalog.model_path("tiny/gguf:Q8_0")
    assert catalog.model_path("tiny/gguf:Q2_K") is None


def test_all_parts_of_a_split_gguf_file(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "ggufs"
    (directory / "Q8_0").mkdir(parents=True)
    make_gguf(directory / "tiny-Q4_K_M.gguf")
    parts = split_gguf(directory / "Q8_0" / "tiny-Q8_0.gguf")
    served.add("tiny/gguf", directory)
    files = catalog.resolve("tiny/gguf:Q8_0")
    assert sorted(served.fetched()) == [part.name for part in parts]
    assert files.path.name == parts[0].name and files.description.id == "tiny/gguf:Q8_0"
    assert files.num_bytes == sum(part.stat().st_size for part in parts)
    offline(monkeypatch)
    assert catalog.model_path(f"tiny/gguf:{parts[1].name}") == files.path
    (files.path.parent / parts[1].name).unlink()
    assert catalog.model_path("tiny/gguf:Q8_0") is None


def test_a_connection_that_breaks_is_taken_up_where_it_stopped(
    served: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16)
    content = (repository / "model.safetensors").read_bytes()
    served.cut_after = 40
    path = catalog.pull(NAME)
    assert (path / "model.safetensors").read_bytes() == content
    (resumed,) = [line for line in served.requests if "bytes=" in line and "model.safetensors" in line]
    assert resumed.endswith(" bytes=32-")


def test_a_pull_that_failed_leaves_no_half_model_and_the_next_fetches_what_is_missing(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.broken = True
    with pytest.raises(ModelError, match=rf"^{NAME}: could not be fetched from the hub \(.*503"):
        catalog.pull(NAME)
    assert catalog.model_path(NAME) is None
    served.broken = False
    before = len(served.fetched())
    path = catalog.pull(NAME)
    assert served.fetched()[before:] == ["model.safetensors"] and catalog.model_path(NAME) == path


def test_an_interrupt_does_not_wait_for_the_rest(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16)
    served.held.clear()

    def interrupt(activity: str, done: int, total: int) -> None:
        if done > 0 and "model.safetensors" in served.fetched():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog.pull(NAME, interrupt)
    served.held.set()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("hub_")]:
        thread.join(30)  # ends by itself with the next bytes
        assert not thread.is_alive()
    assert catalog.model_path(NAME) is None


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "GatedRepo", "is gated: accept its terms on the hub, and set HF_TOKEN"),
        (401, "GatedRepo", "is gated"),
        (401, "RepoNotFound", "the hub has no tiny/llama, or it is private and HF_TOKEN gives no access"),
        (404, "RepoNotFound", "the hub has no tiny/llama"),
        (403, "", "403 Forbidden"),
        (500, "", "500"),
    ],
)
def test_refusals_name_the_model_and_what_to_do(
    served: Hub, monkeypatch: pytest.MonkeyPatch, status: int, code: str, says: str
) -> None:
    served.refused[NAME] = (status, code)
    with pytest.raises(ModelError, match=rf"^{NAME}: .*{says}.*; or give --model PATH") as caught:
        catalog.pull(NAME)
    assert "\n" not in caught.value.message and not served.fetched()


def test_what_was_pulled_serves_without_a_network(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = catalog.pull(NAME)
    served.refused[NAME] = (503, "")
    seen: list[str] = []
    assert catalog.pull(NAME, lambda activity, done, total: seen.append(activity)) == path
    assert seen[-1].endswith(f"using {path}")
    offline(monkeypatch)
    asked = len(served.requests)
    assert catalog.pull(NAME) == path and len(served.requests) == asked
    with pytest.raises(ModelError, match="other/model: HF_HUB_OFFLINE is set and it was not pulled before"):
        catalog.pull("other/model")


def test_what_is_on_disk_counts_though_another_program_put_it_there(served: Hub, tmp_path: Path) -> None:
    """transformers or an older huggingface_hub keeps no listing of the repository beside it."""
    path = catalog.pull(NAME)
    for listing in (tmp_path / "hub").rglob("trees/*.json"):
        listing.unlink()
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    assert catalog.model_path(NAME) == path


def test_nobody_waits_for_a_hub_that_is_not_there(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"tiny/llama: could not be fetched from the hub \(.*refused"):
        catalog.pull(NAME)


def test_the_hub_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"some/model: .*huggingface-hub"):
        catalog.pull("some/model")
    assert catalog.model_path("some/model") is None


def test_the_command_shows_progress_and_prints_the_path(served: Hub, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": served.address, "HF_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

    def models(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "deploy.cli", "models", *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    pulled = models("pull", NAME, "--json")
    assert pulled.returncode == 0, pulled.stderr
    path = Path(json.loads(pulled.stdout)["path"])
    assert sorted(file.name for file in path.iterdir()) == NEEDED and path.is_relative_to(tmp_path / "home")
    assert f"downloading {NAME}  100 %" in pulled.stderr
    assert models("path", NAME).stdout == f"{path}\n"
    served.refused["tiny/gated"] = (401, "GatedRepo")
    refused = models("pull", "tiny/gated")
    assert refused.returncode != 0 and refused.stdout == ""
    assert "tiny/gated: tiny/gated is gated" in refused.stderr and "Traceback" not in refused.stderr
