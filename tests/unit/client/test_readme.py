"""What the README tells people to type works."""

import re
from pathlib import Path

import pytest
from google.protobuf import json_format

from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from tests.unit.client.fake_server import serving

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


def test_the_python_example_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with serving() as (server, address):
        exec(compile(example.replace("127.0.0.1:50051", address), "README.md", "exec"), {})
    assert capsys.readouterr().out == "Hello world"
    (request,) = server.requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "Why is the sky blue?")]
    assert request.stop.max_tokens == 200


def test_the_grpcurl_example_is_a_request() -> None:
    (body,) = re.findall(r"grpcurl -plaintext -d '(.*?)'", README)
    request = json_format.Parse(body, pb.GenerateRequest())
    assert request.chat.messages[0].role == "user"
    assert request.stop.max_tokens == 200
