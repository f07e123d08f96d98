"""The synchronous client against a scripted server."""

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

import stepwire_client as sw
from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from stepwire_client.options import is_local, pause_before_retry
from tests.unit.client.fake_server import FakeInference, answer, fail, retry_info, serving

FAST = sw.Retry(attempts=3, first_s=0.001, max_s=0.002)


@pytest.fixture
def served() -> Iterator[tuple[FakeInference, sw.Client]]:
    with serving() as (server, address), sw.Client(address, retry=FAST, deadline=20) as client:
        yield server, client


def test_generate_brings_typed_events(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served
    events = list(client.generate("Hi", temperature=0, seed=9, max_tokens=4, stop_strings=["x"], request_id="r"))
    usage = sw.Usage(3, 1, 2)
    assert events == [
        sw.Started("r", 3, 9),
        sw.Delta("Hello", (5,)),
        sw.Delta(" world", (6,)),
        sw.Finished(sw.FinishReason.EOS, usage, 2),
    ]
    sent = server.requests[0]
    assert (sent.text, sent.sampling.seed, sent.stop.max_tokens, list(sent.stop.stop_strings)) == ("Hi", 9, 4, ["x"])
    assert sent.sampling.HasField("temperature") and not sent.sampling.HasField("top_p")


def test_texts_and_completion_agree(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served
    assert "".join(client.generate(token_ids=[1, 2]).texts()) == "Hello world"
    with pytest.raises(ValueError, match="n > 1"), client.generate(token_ids=[1, 2], n=2) as two:
        "".join(two.texts())
    server.requests.pop()
    assert list(server.requests[0].token_ids.ids) == [1, 2]
    whole = client.complete("Hi")
    assert server.requests[1].HasField("stream") and not server.requests[1].stream
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("Hello world", (5, 6), "eos")


@pytest.mark.parametrize("forever", [float("inf"), 1e300, 1e10])
def test_a_deadline_that_never_comes_is_none(served: tuple[FakeInference, sw.Client], forever: float) -> None:
    _, client = served
    assert client.complete("Hi", deadline=forever).text == "Hello world"
    assert client.model_info(deadline=forever).model
    client.watch_steps(deadline=forever).close()

    async def ask() -> None:
        async with sw.AsyncClient(client.address, deadline=forever) as other:
            assert (await other.complete("Hi")).text == "Hello world"
            assert (await other.model_info()).model

    asyncio.run(ask())
    with pytest.raises(ValueError, match="not a number"):
        client.complete("Hi", deadline=float("nan"))


def test_chat_takes_messages_and_mappings(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served
    client.chat([sw.Message("system", "s"), {"role": "user", "content": "u"}], add_generation_prompt=False)
    chat = server.requests[0].chat
    assert [(m.role, m.content) for m in chat.messages] == [("system", "s"), ("user", "u")]
    assert chat.HasField("add_generation_prompt") and not chat.add_generation_prompt


HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({}, ValueError, "exactly one"),
        ({"text": "a", "token_ids": [1]}, ValueError, "exactly one"),
        ({"text": "a", "template": "t"}, ValueError, "template"),
        ({"messages": [{"role": "user"}]}, ValueError, "role and content"),
        ({"text": "a", "tempersture": 1}, TypeError, "tempersture"),
        ({"text": "a", "stop_strings": "END"}, TypeError, "stop_strings: a list"),
        ({"text": "a", "max_tokens": 1 << 40}, ValueError, "max_tokens: "),
        ({"text": "a", "top_k": 1.5, "top_p": 0.5}, TypeError, "top_k: "),
        ({"text": "a", "n": -1}, ValueError, "n: "),
        ({"text": "a\ud800"}, ValueError, "text: not Unicode text, from character 2 on"),
        ({"messages": [HI, {"role": "user", "content": "\udcff"}]}, ValueError, r"messages\[1\].content: not Unicode"),
        ({"messages": [HI], "template": "\udcff"}, ValueError, "template: not Unicode"),
        ({"text": "a", "stop_strings": ["\udcff"]}, ValueError, "stop_strings: not Unicode"),
        ({"token_ids": [1, -1]}, ValueError, "token_ids.ids: "),
    ],
)
def test_wrong_arguments_are_told_before_any_call(
    served: tuple[FakeInference, sw.Client], arguments: dict[str, Any], error: type[Exception], names: str
) -> None:
    server, client = served
    with pytest.raises(error, match=names):
        client.generate(**arguments)
    assert not server.requests


def test_unary_calls(served: tuple[FakeInference, sw.Client]) -> None:
    _, client = served
    info = client.model_info()
    assert (info.model, info.eos_token_ids, info.bos_token_id, info.features) == ("toy", (2,), None, ("chat",))
    assert info.default_sampling == sw.Sampling(temperature=0.5, top_k=4)
    assert client.tokenize("ab") == sw.Tokens((97, 98), ("a", "b"))
    assert client.detokenize([97, 98]) == "ab"
    assert client.apply_chat_template([{"role": "user", "content": "x"}]) == sw.Prompt("<user>x", (1, 2))
    assert client.abort("live") and not client.abort("gone")
    stats = client.stats()
    assert [(t.tenant, t.running, t.weight) for t in stats.tenants] == [("a", 2, 1.5)]
    assert stats.requests_accepted == 4 and stats.executors[0].num_blocks == 9
    assert client.drain(5) == 5
    assert [step.step_id for step in client.watch_steps(3)] == [1, 2, 3]


def test_health(served: tuple[FakeInference, sw.Client]) -> None:
    _, client = served
    assert client.health() is sw.Health.SERVING
    assert client.health("stepwire.v1.Inference") is sw.Health.NOT_SERVING
    assert client.health("no.such.Service") is sw.Health.SERVICE_UNKNOWN


def test_errors_carry_what_the_server_told(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served

    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        violation = error_details_pb2.BadRequest.FieldViolation(field="token_ids", description="too long")
        info = error_details_pb2.ErrorInfo(reason="TOO_LARGE", domain="stepwire", metadata={"limit": "128 tokens"})
        fail(
            context, grpc.StatusCode.INVALID_ARGUMENT, "too long", info,
            error_details_pb2.BadRequest(field_violations=[violation]),
        )  # fmt: skip
        yield from ()

    server.script = refuse
    stream = client.generate("x")
    with pytest.raises(sw.InvalidArgument, match="too long") as caught:
        next(stream)
    error = caught.value
    assert (error.status, error.reason, error.field) == ("INVALID_ARGUMENT", "TOO_LARGE", "token_ids")
    assert error.limit == "128 tokens" and error.retry_after is None
    assert list(stream) == [], "an iterator that raised is over"


def test_a_message_too_large_for_grpc_names_size_and_limit(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served
    with pytest.raises(
        sw.ResourceExhausted, match=r"of 50000\d\d bytes .* server's max_message_bytes, 4194304"
    ) as caught:
        client.complete("x" * 5_000_000)
    assert (caught.value.reason, caught.value.limit) == ("MESSAGE_TOO_LARGE", "4194304")
    with sw.Client(client.address, max_message_bytes=90) as small:
        with pytest.raises(sw.ResourceExhausted, match=r"of 1\d\d bytes .* this client's max_message_bytes, 90"):
            small.complete("x" * 100)
        server.script = lambda request, context: iter([pb.GenerateResponse(delta=pb.Delta(text="x" * 100))])
        with pytest.raises(sw.ResourceExhausted, match=r"of 1\d\d bytes .* this client's max_message_bytes, 90"):
            small.complete("x")


def test_unavailable_is_retried_before_the_first_message(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served

    def third_time_lucky(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(server.requests) < 3:
            fail(context, grpc.StatusCode.UNAVAILABLE, "no executor", retry_info(1))
        yield from answer(request, context)

    server.script = third_time_lucky
    assert client.complete("x").text == "Hello world"
    assert len(server.requests) == 3


def test_retries_are_bounded(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served

    def never(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        fail(context, grpc.StatusCode.UNAVAILABLE, "draining", error_details_pb2.ErrorInfo(reason="DRAINING"))
        yield from ()

    server.script = never
    with pytest.raises(sw.Unavailable) as caught:
        client.complete("x")
    assert caught.value.reason == "DRAINING" and len(server.requests) == FAST.attempts


def test_a_retry_that_would_pass_the_deadline_is_not_waited_for(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served

    def later(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        detail = retry_info(0)
        detail.retry_delay.seconds = 3600
        fail(context, grpc.StatusCode.UNAVAILABLE, "busy", detail)
        yield from ()

    server.script = later
    for deadline in (10.0, None):  # without a deadline Retry.longest_s is the bound
        with pytest.raises(sw.Unavailable) as caught:
            client.complete("x", deadline=deadline)
        assert caught.value.retry_after == 3600
    assert len(server.requests) == 2


def test_closing_ends_the_pause_before_a_retry(
    served: tuple[FakeInference, sw.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = served
    pausing = threading.Event()

    def long_pause(*_: object) -> float:
        pausing.set()
        return 3600.0

    def down(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        fail(context, grpc.StatusCode.UNAVAILABLE, "down")
        yield from ()

    monkeypatch.setattr("stepwire_client.client.pause_before_retry", long_pause)
    server.script = down
    stream = client.generate("x")
    with futures.ThreadPoolExecutor(1) as pool:
        reader = pool.submit(next, stream)
        assert pausing.wait(10)
        stream.close()
        with pytest.raises(sw.Cancelled):
            reader.result(10)
    assert len(server.requests) == 1


def test_nothing_is_retried_after_the_first_message(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served

    def breaks(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(started=pb.Started(request_id="r"))
        fail(context, grpc.StatusCode.UNAVAILABLE, "gone")

    server.script = breaks
    with pytest.raises(sw.Unavailable, match="gone"):
        list(client.generate("x"))
    assert len(server.requests) == 1


def test_a_stream_without_finish_is_an_error(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served
    server.script = lambda request, context: iter([pb.GenerateResponse(started=pb.Started(request_id="r"))])
    with pytest.raises(sw.BrokenStream):
        list(client.generate("x"))


def endless(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(started=pb.Started(request_id="r"))
    while context.is_active():
        yield pb.GenerateResponse(delta=pb.Delta(text="a", token_ids=[1]))


@pytest.mark.parametrize("how", ["break", "with", "close", "drop"])
def test_leaving_a_stream_cancels_the_call(served: tuple[FakeInference, sw.Client], how: str) -> None:
    server, client = served
    server.script = endless
    match how:
        case "break":
            for text in client.generate("x").texts():
                assert text
                break
        case "with":
            with client.generate("x") as stream:
                next(stream)
        case "close":
            stream = client.generate("x")
            next(stream)
            stream.close()
            with pytest.raises(sw.Cancelled):
                list(stream)
        case "drop":
            stream = client.generate("x")
            next(stream)
            del stream
    assert server.cancelled.wait(10), "the server never heard of it"


def test_deadline(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served
    server.script = endless
    with pytest.raises(sw.DeadlineExceeded):
        list(client.generate("x", deadline=0.3))


def test_no_server_is_a_typed_error(tmp_path: Path) -> None:
    with sw.Client(f"unix:{tmp_path}/none.sock", retry=FAST) as client, pytest.raises(sw.Unavailable):
        client.model_info(deadline=10)


def test_unary_calls_retry_too(served: tuple[FakeInference, sw.Client]) -> None:
    server, client = served
    server.model_failures = [lambda context: fail(context, grpc.StatusCode.UNAVAILABLE, "later", retry_info(5))]
    assert client.model_info().model == "toy"
    assert not server.model_failures


def test_channels_are_separate_connections_used_in_turn() -> None:
    with serving() as (server, address), sw.Client(address, num_channels=3) as client:
        for _ in range(6):
            client.complete("x")
        assert len(server.peers) == 3


def test_unix_socket_and_token(tmp_path: Path) -> None:
    with serving(f"unix:{tmp_path}/api.sock") as (server, address), sw.Client(address, token="secret") as client:
        assert client.complete("x").text == "Hello world"
        assert server.metadata[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("token", ["secret\n", "sec ret", "sécret", "\udcff", "sec\x00ret"])
def test_a_token_that_no_header_carries_is_told_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match=r"token: character \d is") as caught:
        sw.Client(token=token)
    assert "sec" not in str(caught.value)


def test_loopback_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with serving() as (_, address), sw.Client(address, retry=FAST) as client:
        assert client.complete("x", deadline=10).text == "Hello world"
    assert not is_local("example.org:443") and is_local("[::1]:5") and is_local("unix:/x")


def test_the_servers_wish_is_honoured() -> None:
    error = sw.Unavailable("later", retry_after=2.0)
    retry = sw.Retry(first_s=0.1)
    assert pause_before_retry(error, retry, retry.pauses(), None) == 2.0
    assert pause_before_retry(error, retry, retry.pauses(), 1.9) is None
    assert pause_before_retry(error, retry, iter(()), None) is None
    assert pause_before_retry(sw.ResourceExhausted("full"), retry, retry.pauses(), None) is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_mutual_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    pair = (key.read_bytes(), cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], root_certificates=pair[1], require_client_auth=True)
    with serving(credentials=credentials) as (_, bound):
        address = bound.replace("127.0.0.1", "localhost")
        with sw.Client(address, tls=sw.Tls(cert, cert, key), token="t", retry=FAST) as client:
            assert client.complete("x", deadline=20).text == "Hello world"
        with sw.Client(address, tls=sw.Tls(cert), retry=FAST) as client, pytest.raises(sw.Unavailable):
            client.complete("x", deadline=20)


def test_pauses_double_and_are_bounded() -> None:
    assert list(sw.Retry(attempts=5, first_s=1, max_s=4).pauses(draw=lambda: 0.0)) == [1, 2, 4, 4]
    assert list(sw.Retry(attempts=2, first_s=1).pauses(draw=lambda: 1.0)) == [0.5]
    with pytest.raises(ValueError, match="num_channels"):
        sw.Client(num_channels=0)
    with pytest.raises(ValueError, match="belong together"):
        sw.Client(tls=sw.Tls(cert=Path("x")))


def test_loads_little(tmp_path: Path) -> None:
    """The client stands alone: no numpy, nothing of the server."""
    code = (
        "import stepwire_client, sys; "
        "bad = {'numpy', 'torch', 'common', 'stepwire'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
