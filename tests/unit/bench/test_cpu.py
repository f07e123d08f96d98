"""What the comparison makes of its runs, and which peers it finds."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench import cpu
from bench.cpu import Run, peers, ratio, summarise
from bench.peers.base import Setup
from bench.peers.events import events

SETUP = Setup(threads=2, model=Path("none.gguf"), vocab_size=100)


def made(peer: str, turn: int, tokens_per_s: float, p99: float = 10.0, **more: Any) -> Run:
    itl = {"p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": p99}
    given = {"read_gb_s": 10.0 + turn, "bf16_gflop_s": 100.0}
    result = {"output_tokens_per_s": tokens_per_s, "itl": itl, "ttft": itl, **more}
    return Run("W4" if more else "W1", peer, turn, 0.1, 0.5, given, result)


def test_like_is_set_beside_like_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made("stepwire", turn, speed) for turn, speed in enumerate((100.0, 50.0, 80.0))]
    runs += [made("llama.cpp", turn, speed) for turn, speed in enumerate((50.0, 50.0, 20.0))]
    runs += [made("transformers", turn, 10.0) for turn in range(3)]
    found = summarise(runs, peers(SETUP))["W1"]
    assert found["stepwire"]["median_run"]["output_tokens_per_s"] == 80.0
    assert found["stepwire"]["ours_to_it"] == 1.0
    assert found["llama.cpp"]["ours_to_it"] == 2.0  # of 2, 1 and 4
    assert found["llama.cpp"]["read_gb_s"] == [10.0, 11.0, 12.0]
    assert found["transformers"]["ours_to_it"] is None  # ours in bf16 did not run
    cpu.show({"W1": found})
    assert "2.00" in capsys.readouterr().out


def test_beside_an_intruder_the_gap_counts() -> None:
    ours = made("stepwire", 0, 50.0, p99=100.0, intruder_ttft_ms=1.0)
    assert ratio(ours, made("llama.cpp", 0, 500.0, p99=250.0, intruder_ttft_ms=1.0)) == 2.5


def test_a_peer_that_is_not_there_says_what_is_missing() -> None:
    setup = Setup(2, Path("none.gguf"), 100, llama_server="/nowhere/llama-server", vllm_python="")
    reasons = {peer.name: peer.missing() for peer in peers(setup)}
    assert "llama-server" in reasons["llama.cpp"] and "--vllm-python" in reasons["vllm-cpu"]
    assert reasons["stepwire"] == ""


def test_an_unknown_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu.main(["--peers", "nobody"])
    assert "nobody" in capsys.readouterr().err


async def collected(answer: bytes) -> list[dict[str, Any]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        stream: AsyncIterator[dict[str, Any]] = events(server.sockets[0].getsockname()[1], "/x", {"a": 1})
        return [event async for event in stream]


def chunked(*pieces: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def test_events_are_read_however_they_are_cut() -> None:
    answer = chunked(b'data: {"n": 1}\n\ndata: {"n"', b": 2}\n\n", b"data: [DONE]\n\n")
    assert asyncio.run(collected(answer)) == [{"n": 1}, {"n": 2}]


def test_another_status_is_an_error_with_its_text() -> None:
    with pytest.raises(RuntimeError, match=r"500.*broken"):
        asyncio.run(collected(b"HTTP/1.1 500 no\r\n\r\nbroken"))
