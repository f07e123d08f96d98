"""What `stepwire up` prints last; tests/integration/test_api_security.py runs it."""

import asyncio
import sys
from pathlib import Path

import pytest

from deploy.how_to_call import address_to_call, how_to_call, own_folder
from scheduler_svc.config import SchedulerConfig
from stepwire_client import ModelInfo, Sampling

PLAIN = SchedulerConfig()
MUTUAL = SchedulerConfig(tls_cert=Path("/c.pem"), tls_key=Path("/k"), tls_client_ca=Path("/ca.pem"))


def test_the_address_is_named() -> None:
    text = how_to_call("127.0.0.1:5", PLAIN)
    assert "stepwire chat --address 127.0.0.1:5\n" in text and "grpcurl -plaintext" in text and "Ctrl-C" in text
    assert "stepwire top --address 127.0.0.1:5" in text
    assert "-unix /x" in how_to_call("unix:/x", PLAIN)


@pytest.mark.parametrize(
    ("has_tokenizer", "has_chat_template", "words"),
    [
        (True, True, ["stepwire chat --address a:1\n", '{"text": "Hello", ', ").chat(["]),
        (True, False, ["stepwire generate Hello --address a:1\n", '{"text": "Hello", ', ').complete("Hello")']),
        (False, False, ['{"token_ids": {"ids": [1, 2, 3]}, ', ").complete(token_ids=[1, 2, 3])"]),
    ],
)
def test_only_what_the_model_can_take_is_named(has_tokenizer: bool, has_chat_template: bool, words: list[str]) -> None:
    info = ModelInfo("m", "", 9, 8, 8, (), None, has_tokenizer, has_chat_template, Sampling(), (), "")
    text = how_to_call("a:1", PLAIN, info=info)
    assert all(word in text for word in words)
    assert ("stepwire chat" in text, "Hello" in text) == (has_chat_template, has_tokenizer)


def test_commands_are_named_by_their_place_where_no_shell_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_folder() is None  # not installed here: run as a module
    (tmp_path / "stepwire").touch(0o755)
    assert own_folder() == tmp_path
    text = how_to_call("a:1", PLAIN, own_folder())
    assert f"  {tmp_path}/stepwire chat --address a:1\n" in text and f": {tmp_path}/stepwire top" in text
    assert f"# Python: {tmp_path}/python" in text
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_folder() is None


def test_a_token_is_not_shown_but_read() -> None:
    text = how_to_call("a:1", SchedulerConfig(auth_tokens_file=Path("/t")))
    assert "export STEPWIRE_TOKEN=$(awk" in text and "Bearer $STEPWIRE_TOKEN" in text and "token=os.environ" in text


def test_who_must_bring_a_certificate_is_told_so() -> None:
    text = how_to_call("a:1", MUTUAL)
    assert "chat --address a:1 --tls-ca /c.pem --tls-cert CLIENT.pem --tls-key CLIENT.key" in text
    assert "grpcurl -cacert /c.pem -cert CLIENT.pem -key CLIENT.key" in text and "-plaintext" not in text


def test_nothing_is_asked_where_it_could_not_answer() -> None:
    for config, address in ((PLAIN, "127.0.0.1:1"), (MUTUAL, "127.0.0.1:1"), (PLAIN, "unix:/nonexistent")):
        assert asyncio.run(address_to_call(address, config)) == address
