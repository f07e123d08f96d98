"""The gateway's requests in Stepwire's terms; what has none is refused by name."""

from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm

from common.errors import InvalidInput, NotSupported
from scheduler_svc.api.vllm_messages import to_stepwire


def request(params: dict[str, Any] | None = None, **fields: Any) -> Any:
    return vllm.GenerateRequest(
        request_id="r",
        tokenized=vllm.TokenizedInput(input_ids=[1, 2]),
        sampling_params=vllm.SamplingParams(**(params or {})),
        **fields,
    )


def test_what_is_not_given_is_the_protocols_default_not_the_models() -> None:
    converted = to_stepwire(request())
    sampling = converted.sampling
    assert list(converted.token_ids.ids) == [1, 2] and converted.request_id == "r"
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.top_k) == (1.0, 1.0, 1.0, 0)
    assert sampling.HasField("temperature") and sampling.HasField("top_p") and sampling.HasField("top_k")
    assert not sampling.HasField("seed") and not converted.stop.HasField("max_tokens")
    assert converted.HasField("stream") and not converted.stream
    assert not converted.output.detokenize and not converted.output.HasField("logprobs")


def test_values_go_over() -> None:
    params: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "max_tokens": 7,
        "stop": ["x"],
        "stop_token_ids": [9],
        "seed": -1,
    }
    converted = to_stepwire(
        request({**params, "logprobs": 3, "logit_bias": {4: -2.0}, "ignore_eos": True}, stream=True)
    )
    assert converted.sampling.temperature == 0.0 and converted.sampling.top_p == 0.5
    assert converted.sampling.seed == 2**64 - 1 and converted.sampling.logit_bias[4] == -2.0
    assert converted.stop.max_tokens == 7 and list(converted.stop.stop_strings) == ["x"]
    assert list(converted.stop.stop_token_ids) == [9] and converted.stop.ignore_eos
    assert converted.n == 1 and to_stepwire(request({"n": 3})).n == 3
    assert converted.output.logprobs == 3 and converted.output.detokenize and converted.stream


@pytest.mark.parametrize(
    ("params", "fields", "named"),
    [
        ({"json_object": True}, {}, "sampling_params.json_object"),
        ({"regex": "a*"}, {}, "sampling_params.regex"),
        ({"truncate_prompt_tokens": 5}, {}, "sampling_params.truncate_prompt_tokens"),
        ({"logprobs": -1}, {}, "sampling_params.logprobs"),
        ({}, {"mm_inputs": vllm.MultimodalInputs()}, "mm_inputs"),
        ({}, {"media_refs": vllm.MediaRefs()}, "media_refs"),
        ({}, {"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({}, {"data_parallel_rank": 1}, "data_parallel_rank"),
    ],
)
def test_what_stepwire_lacks_is_refused_by_name(params: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(NotSupported) as caught:
        to_stepwire(request(params, **fields))
    assert caught.value.field == named


def test_a_negative_token_id_is_no_overflow() -> None:
    with pytest.raises(InvalidInput):
        to_stepwire(request({"logit_bias": {-1: 1.0}}))
