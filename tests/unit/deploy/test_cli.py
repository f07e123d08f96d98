"""The command line against the scripted server: outputs, statuses, one-line errors."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from deploy import calls, model_commands
from deploy.cli import run
from deploy.progress import ProgressLine
from deploy.terminal import printable
from executor_svc.kernels_cpu.compile import LEVELS, NoKernels, own_level
from executor_svc.kernels_cpu.library import load_library
from stepwire_client import Cancelled, Delta, Generation, Message, Unavailable
from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from tests.unit.client.fake_server import FakeInference, fail, serving
from tests.unit.kernels_cpu.scene import put_foreign


@pytest.fixture
def served() -> Iterator[tuple[FakeInference, str]]:
    with serving() as (server, address):
        yield server, address


Capture = pytest.CaptureFixture[str]


def test_generate_streams_text(served: tuple[FakeInference, str], capsys: Capture) -> None:
    server, address = served
    assert run(["generate", "Hi", "--address", address, "--max-tokens", "4", "--stop", "a", "--stop", "b"]) == 0
    assert capsys.readouterr().out == "Hello world\n"
    sent = server.requests[0]
    assert sent.text == "Hi" and sent.stop.max_tokens == 4 and list(sent.stop.stop_strings) == ["a", "b"]
    assert not sent.sampling.HasField("temperature")


def test_generate_json_is_one_object(served: tuple[FakeInference, str], capsys: Capture) -> None:
    _, address = served
    assert run(["generate", "Hi", "--address", address, "--json", "--seed", "9"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "Hello world" and answer["finish_reason"] == "eos" and answer["seed"] == 9
    assert answer["usage"] == {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2}


def test_generate_prints_each_of_n_answers(served: tuple[FakeInference, str], capsys: Capture) -> None:
    server, address = served
    assert run(["generate", "Hi", "--address", address, "--n", "3"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{i}] Hello world" for i in range(3)]
    assert server.requests[0].n == 3 and not server.requests[0].stream
    assert run(["generate", "Hi", "--address", address, "--n", "2", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(answer["index"] for answer in answers) == [0, 1]


def test_reset_prefix_cache(served: tuple[FakeInference, str], capsys: Capture) -> None:
    _, address = served
    assert run(["reset-prefix-cache", "--address", address]) == 0
    assert capsys.readouterr().out == "5 idle blocks dropped, 2 in use forgotten\n"
    assert run(["reset-prefix-cache", "--address", address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"dropped_blocks": 5, "forgotten_blocks": 2}


def test_generate_reads_standard_input(served: tuple[FakeInference, str], monkeypatch: pytest.MonkeyPatch) -> None:
    server, address = served
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    monkeypatch.setenv("STEPWIRE_ADDRESS", address)
    assert run(["generate", "-"]) == 0
    assert server.requests[0].text == "from a pipe"


def test_chat_one_message(served: tuple[FakeInference, str], capsys: Capture) -> None:
    server, address = served
    assert run(["chat", "Hi", "--system", "be kind", "--address", address, "--token", "t"]) == 0
    assert capsys.readouterr().out == "Hello world\n"
    assert [(m.role, m.content) for m in server.requests[0].chat.messages] == [("system", "be kind"), ("user", "Hi")]
    assert server.metadata[0]["authorization"] == "Bearer t"


def test_chat_keeps_its_history(
    served: tuple[FakeInference, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = served
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n"))
    assert run(["chat", "--json", "--address", address]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["Hello world"] * 3
    turns = [[m.content for m in request.chat.messages] for request in server.requests]
    assert turns == [["one"], ["one", "Hello world", "two"], ["three"]]


def test_a_conversation_survives_a_cut_or_failed_turn(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    lines: list[Any] = ["a", KeyboardInterrupt(), "b", "c", "\udcff", "d", EOFError()]
    seen: list[list[str]] = []

    def read(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    def answer(history: list[Message]) -> str:
        seen.append([m.content for m in history])
        if history[-1].content == "b":
            raise KeyboardInterrupt
        if history[-1].content == "c":
            raise Unavailable("draining")
        if history[-1].content == "\udcff":
            raise ValueError("no text")
        return "yes"

    monkeypatch.setattr("builtins.input", read)
    calls.converse([], answer, interactive=True)
    assert seen == [["a"], ["a", "yes", "b"], ["a", "yes", "c"], ["a", "yes", "\udcff"], ["a", "yes", "d"]]
    told = capsys.readouterr().err
    assert "draining" in told and "no text" in told


class Endless:
    """An answer that nothing but `close` ends; SIGINT comes while it is waited for."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[Delta]:
        yield Delta("begins")
        signal.raise_signal(signal.SIGINT)
        assert self.closed.wait(30)
        raise Cancelled("the stream was closed")

    def close(self) -> None:
        self.closed.set()


def test_an_interrupt_reaches_nobody_inside_of_grpc(capsys: Capture) -> None:
    stream = Endless()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls.stream_answer(cast(Generation, stream))
        assert stream.closed.is_set()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == "begins\n"


@pytest.mark.parametrize("group", [[], ["models"], ["kernels"]])
def test_a_group_alone_shows_its_help(group: list[str], capsys: Capture) -> None:
    assert run(group) == 0
    assert capsys.readouterr().out.startswith(f"Usage: {' '.join(['stepwire', *group])} ")


def test_a_server_that_went_away_is_not_one_that_never_was(
    served: tuple[FakeInference, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: object) -> None:
        raise Unavailable("Stream removed (Socket closed)")

    monkeypatch.setattr(calls, "generate", lost)
    assert run(["generate", "Hi", "--address", served[1]]) == 1
    assert capsys.readouterr().err == "stepwire: the connection was lost: Stream removed (Socket closed)\n"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """own.pem is for 127.0.0.1, other.pem for another host; both with their keys."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificates with openssl")
    at = tmp_path_factory.mktemp("pems")
    for name, host in (("own", "IP:127.0.0.1"), ("other", "DNS:elsewhere")):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-keyout", at / f"{name}.key", "-out", at / f"{name}.pem", "-subj", f"/CN={name}",
             "-addext", f"subjectAltName={host}"],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
    return at


@pytest.mark.parametrize(
    ("server", "host", "arguments", "said"),
    [
        ("own", "127.0.0.1", [], "what listens there hung up: it may expect TLS (--tls-ca) or"),
        ("own", "localhost", [], "what listens there hung up: it may expect TLS (--tls-ca) or"),
        ("own", "127.0.0.1", ["--tls-ca", "other.pem"], "no authority trusted here (--tls-ca) signed its certificate"),
        ("other", "127.0.0.1", ["--tls-ca", "other.pem"], "its certificate is for another name than --address has"),
        ("", "127.0.0.1", ["--tls-ca", "own.pem"], "what listens there expects no TLS; leave out --tls-ca"),
        ("", "127.0.0.1", ["--tls-ca", "own.key"], "own.key is not a PEM file of the expected kind"),
        ("", "no.such.host.invalid", [], "there is no such host"),
    ],
)
def test_who_listens_but_is_not_understood_is_not_said_to_be_absent(
    pems: Path, server: str, host: str, arguments: list[str], said: str
) -> None:
    credentials = None
    if server:
        pair = ((pems / f"{server}.key").read_bytes(), (pems / f"{server}.pem").read_bytes())
        credentials = grpc.ssl_server_credentials([pair])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ.pop("GRPC_VERBOSITY", None)
    with serving(credentials=credentials) as (_, bound):
        address = bound.replace("127.0.0.1", host)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.cli", "generate", "Hi", "--address", address, *arguments],
            cwd=pems, env=environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode != 0 and said in done.stderr and "stepwire up" not in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == "", done.stderr


def test_version(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{version('stepwire')}\n"


def test_info(served: tuple[FakeInference, str], capsys: Capture) -> None:
    _, address = served
    assert run(["info", "--address", address, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"]["model"] == "toy" and shown["health"]["ready"] == "not_serving"
    assert shown["stats"]["executors"][0]["address"] == "e:1"
    assert run(["info", "--address", address]) == 0
    assert "requests_accepted" in capsys.readouterr().out


def test_errors_are_one_line(served: tuple[FakeInference, str], capsys: Capture) -> None:
    server, address = served

    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        fail(context, grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: must be in (0, 1]")
        yield from ()

    server.script = refuse
    assert run(["generate", "Hi", "--address", address]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "stepwire: sampling.top_p: must be in (0, 1] (INVALID_ARGUMENT)\n"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["generate", "x", "--address", "unix:/nonexistent/socket", "--deadline", "5"], 1, "no server answers"),
        (["generate"], 2, "Missing argument"),
        (["generate", "x", "--frob"], 2, "No such option"),
        (["frob"], 2, "No such command"),
        (["up", "--block-sise", "8"], 2, "did you mean --block-size?"),
        (["up", "--block-size", "0"], 2, "block_size '0' (flag --block-size)"),
        (["up", "--model", "/nonexistent/model"], 2, "/nonexistent/model"),
        (["models", "pull", "/nonexistent/model"], 2, "/nonexistent/model"),
        (["models", "path", "/nonexistent/model"], 2, "not on this machine"),
        (["up", "--first-prompt", "\udcff"], 2, "first_prompt '\\udcff': not UTF-8 text"),
        (["generate", "\udcff"], 2, "text: not Unicode text"),
        (["chat", "\udcff"], 2, "messages[0].content: not Unicode text"),
        (["info", "--address", "\udcff:1"], 2, "address: not Unicode text"),
        (["info", "--tls-ca", "/nonexistent/ca.pem"], 1, "/nonexistent/ca.pem: No such file"),
        (["info", "--tls-cert", "/nonexistent/c.pem"], 2, "belong together"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(
    arguments: list[str], status: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STEPWIRE_ADDRESS", "STEPWIRE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert run(arguments) == status
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and "Traceback" not in err and out == ""


def test_models(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["models", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["default"] and listed[0]["path"] is None
    assert run(["models", "list"]) == 0
    assert "stepwire models pull" in capsys.readouterr().out
    model = tmp_path / "m.gguf"
    model.touch()
    assert run(["models", "path", str(model)]) == 0
    assert capsys.readouterr().out == f"{model}\n"
    model_commands.pull_model(str(model), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"model": str(model), "path": str(model)}


@pytest.fixture
def kernel_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a compiler that copies what this machine's own once built."""
    try:
        library = load_library().path
    except NoKernels as error:
        pytest.skip(str(error))
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nfor last; do :; done\ncp {library} "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("executor_svc.kernels_cpu.compile.PREBUILT", tmp_path / "prebuilt")
    return compiler


def test_kernels(capsys: Capture, kernel_compiler: Path, tmp_path: Path) -> None:
    assert run(["kernels", "status"]) == 2
    assert "stepwire kernels build" in capsys.readouterr().out
    assert run(["kernels", "status", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["path"] is None
    assert run(["kernels", "build", "--json"]) == 0
    out, err = capsys.readouterr()
    built = json.loads(out)
    assert built["built"] and Path(built["path"]).is_relative_to(tmp_path / "cache") and err.count("\n") == 1
    kernel_compiler.unlink()
    assert run(["kernels", "build"]) == 0
    assert capsys.readouterr() == (f"{built['path']}\n", "")
    assert run(["kernels", "status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status == {"path": built["path"], "instructions": built["instructions"], "reason": ""}


def test_kernels_of_another_system_are_built_again_and_said_to_be(
    capsys: Capture, kernel_compiler: Path, tmp_path: Path
) -> None:
    place = tmp_path / "cache" / "stepwire" / "kernels" / own_level().file_name()
    put_foreign(place)
    assert run(["kernels", "status", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["reason"].startswith("they are not built; the next start does it")
    assert run(["kernels", "build", "--json"]) == 0
    out, err = capsys.readouterr()
    built = json.loads(out)
    assert (built["path"], built["built"]) == (str(place), True) and "building the CPU kernels" in err


def test_a_build_that_fails_on_a_terminal_says_so_on_a_line_of_its_own(
    capsys: Capture, kernel_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_compiler.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["kernels", "build"]) == 1
    progress, said = capsys.readouterr().err.splitlines()[-2:]
    assert progress.endswith("(some seconds, once)") and said.startswith("stepwire: no CPU kernels, ")


@pytest.mark.parametrize("command", ["build", "status"])
def test_no_kernels_are_one_line_that_says_why(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("executor_svc.kernels_cpu.compile.is_x86", lambda: True)
    monkeypatch.setattr("executor_svc.kernels_cpu.compile.read_cpu_flags", lambda: LEVELS[0].needs)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("PATH", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert run(["kernels", command]) == {"build": 1, "status": 2}[command]
    said = "".join(capsys.readouterr())
    assert said.count("\n") == 1 and "in torch, slower: no C++ compiler is installed (Debian's package g++" in said


def test_asking_for_kernels_loads_no_torch() -> None:
    code = (
        "import sys; from deploy.cli import run; run(['kernels', 'status']); "
        "sys.exit(str({'grpc', 'torch'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_progress_moves_on_a_terminal_and_steps_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, lines in ((Terminal(), 1), (io.StringIO(), 5)):
        progress = ProgressLine(stream)
        for done in range(101):
            progress("loading", done * 1_000_000, 100_000_000)
        progress.done()
        assert stream.getvalue().count("\n") == lines
        assert "100 %  (100.0 of 100.0 MB)" in stream.getvalue()


def test_terminal_text_moves_no_cursor() -> None:
    assert printable("a\x1b[2Jb\x9bc\td\né") == "a[2Jbc\td\né"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from deploy.cli import run; run(['--help']); "
        "sys.exit(str({'grpc', 'numpy', 'torch', 'pydantic', 'rich'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
