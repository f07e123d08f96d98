"""A stand-in for a model hub, on loopback: what huggingface_hub asks of one, answered as the real one does.

Small files come at once with their git id as ETag; large ones (safetensors, GGUF, pickles) are a redirect to another
path that carries X-Linked-Etag and X-Linked-Size and understands Range. Refusals carry X-Error-Code.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    """What is served and what was asked. Written by the test and by the server's threads, one after the other.

    `revisions`: repository → revision → path → content. `refused`: repository → (status, error code).
    `cut_after`: bytes of a large file after which the connection breaks, once; None: never.
    `broken`: large files are answered 503 from then on. `held`: while not set, a large file stops half-way.
    """

    address: str = ""
    revisions: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut_after: int | None = None
    broken: bool = False
    held: Event = field(default_factory=Event)
    requests: list[str] = field(default_factory=list)

    def add(self, repository: str, directory: Path, revision: str = "main") -> None:
        files = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        self.revisions.setdefault(repository, {})[revision] = files

    def fetched(self) -> list[str]:
        """Names of files whose content was sent, whole or in part."""
        return [line.split()[1].rsplit("/", 1)[1] for line in self.requests if line.startswith("SENT ")]


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    hub.held.set()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.held.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it so
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".rstrip())
        if path.startswith("/cdn/"):
            self._large(path)
            return
        is_api = path.startswith("/api/models/")
        owner, name, *rest = path.removeprefix("/api/models/").strip("/").split("/")
        repository = f"{owner}/{name}"
        if repository in self.hub.refused:
            self._refuse(*self.hub.refused[repository])
        elif repository not in self.hub.revisions:
            self._refuse(401, "RepoNotFound")
        else:
            revision = rest[1] if len(rest) > 1 else "main"
            served = self.hub.revisions[repository]
            known = {key: files for label, files in served.items() for key in (label, commit_of(repository + label))}
            commits = {
                key: commit_of(repository + label) for label in served for key in (label, commit_of(repository + label))
            }
            if revision not in known:
                self._refuse(404, "RevisionNotFound")
            elif is_api:
                self._api(repository, commits[revision], known[revision], tree=rest[:1] == ["tree"])
            else:
                self._file(repository, commits[revision], known[revision], "/".join(rest[2:]))

    def _api(self, repository: str, commit: str, files: dict[str, bytes], tree: bool) -> None:
        listed: list[dict[str, Any]] = []
        for path, content in files.items():
            git, sha = hashlib.sha1(content).hexdigest(), hashlib.sha256(content).hexdigest()
            large = path.endswith(LARGE)
            if tree:
                entry = {"type": "file", "path": path, "size": len(content), "oid": git}
                lfs = {"oid": sha, "size": len(content), "pointerSize": 130}
            else:
                entry = {"rfilename": path, "size": len(content), "blobId": git}
                lfs = {"sha256": sha, "size": len(content), "pointerSize": 130}
            listed.append(entry | ({"lfs": lfs} if large else {}))
        answer = listed if tree else {"id": repository, "sha": commit, "siblings": listed}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: str, commit: str, files: dict[str, bytes], path: str) -> None:
        content = files.get(path)
        if content is None:
            self._refuse(404, "EntryNotFound")
        elif path.endswith(LARGE):
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                # Another host, as the real one's: huggingface_hub follows redirects within a hub by itself.
                "Location": f"{self.hub.address.replace('127.0.0.1', 'localhost')}/cdn/{repository}/{commit}/{path}",
            }
            self._send(302, b"", headers)
        else:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            if self.command == "GET":
                self.hub.requests.append(f"SENT {path if '/' in path else '/' + path}")
            self._send(200, content, headers)

    def _large(self, path: str) -> None:
        owner, name, commit, inside = path.removeprefix("/cdn/").split("/", 3)
        repository = f"{owner}/{name}"
        served = self.hub.revisions[repository]
        content = next(files[inside] for label, files in served.items() if commit_of(repository + label) == commit)
        if self.hub.broken:
            self._send(503, b"", {})
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET":
            self.hub.requests.append(f"SENT {path}")
        self._send(206 if start else 200, content[start:], headers, cut=self.command == "GET")

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut and self.hub.cut_after is not None:
            self.wfile.write(body[: self.hub.cut_after])
            self.hub.cut_after = None
            self.close_connection = True
        elif cut:
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.hub.held.wait(60)
            self.wfile.write(body[half:])
        else:
            self.wfile.write(body)
