"""Every field's range and default, each refusal naming field and limit."""

import math
from dataclasses import replace
from typing import Any

import pytest

from common.errors import InvalidInput, NotSupported, StepwireError, TooLarge
from common.model_files.description import SamplingDefaults
from scheduler_svc.api.validation import Limits, ValidRequest, validate
from stepwire.v1 import inference_pb2 as pb

LIMITS = Limits(
    vocab_size=1000,
    max_context=2048,
    max_prompt_tokens=2000,
    features=frozenset({"raw_logits", "prompt_logprobs"}),
    has_tokenizer=True,
    max_message_bytes=16 * 1024 * 1024,
)
NONE = SamplingDefaults()


def check(limits: Limits = LIMITS, defaults: SamplingDefaults = NONE, **fields: Any) -> ValidRequest:
    return validate(pb.GenerateRequest(text="hi", **fields), defaults, limits)


def sampling(**fields: Any) -> ValidRequest:
    return check(sampling=pb.SamplingParams(**fields))


NAN, INF = math.nan, math.inf

BAD_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "sampling.temperature", "[0, 100]"),
    ({"temperature": 100.5}, "sampling.temperature", "[0, 100]"),
    ({"temperature": NAN}, "sampling.temperature", "[0, 100]"),
    ({"temperature": INF}, "sampling.temperature", "[0, 100]"),
    ({"temperature": -INF}, "sampling.temperature", "[0, 100]"),
    ({"top_p": 0.0}, "sampling.top_p", "(0, 1]"),
    ({"top_p": 1.01}, "sampling.top_p", "(0, 1]"),
    ({"top_p": -1.0}, "sampling.top_p", "(0, 1]"),
    ({"top_p": NAN}, "sampling.top_p", "(0, 1]"),
    ({"min_p": -0.1}, "sampling.min_p", "[0, 1]"),
    ({"min_p": 1.1}, "sampling.min_p", "[0, 1]"),
    ({"min_p": NAN}, "sampling.min_p", "[0, 1]"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty", "[0.01, 10]"),
    ({"repetition_penalty": -1.0}, "sampling.repetition_penalty", "[0.01, 10]"),
    ({"repetition_penalty": 1e-30}, "sampling.repetition_penalty", "[0.01, 10]"),
    ({"repetition_penalty": 11.0}, "sampling.repetition_penalty", "[0.01, 10]"),
    ({"repetition_penalty": INF}, "sampling.repetition_penalty", "[0.01, 10]"),
    ({"presence_penalty": -2.1}, "sampling.presence_penalty", "[-2, 2]"),
    ({"presence_penalty": 3e38}, "sampling.presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": 2.1}, "sampling.frequency_penalty", "[-2, 2]"),
    ({"frequency_penalty": NAN}, "sampling.frequency_penalty", "[-2, 2]"),
    ({"logit_bias": {1000: 1.0}}, "sampling.logit_bias[1000]", "999"),
    ({"logit_bias": {5: 100.5}}, "sampling.logit_bias[5]", "[-100, 100]"),
    ({"logit_bias": {5: NAN}}, "sampling.logit_bias[5]", "[-100, 100]"),
    ({"logit_bias": {5: -INF}}, "sampling.logit_bias[5]", "[-100, 100]"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias", "1024"),
    ({"allowed_token_ids": [1, 4_000_000_000]}, "sampling.allowed_token_ids[1]", "999"),
]

BAD_STOP: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "stop.max_tokens", "1"),
    ({"max_tokens": 5, "min_tokens": 6}, "stop.min_tokens", "5"),
    ({"stop_token_ids": [1000]}, "stop.stop_token_ids[0]", "999"),
    ({"stop_token_ids": range(65)}, "stop.stop_token_ids", "64"),
    ({"stop_strings": ["a", ""]}, "stop.stop_strings[1]", "256"),
    ({"stop_strings": ["x" * 257]}, "stop.stop_strings[0]", "256"),
    ({"stop_strings": [str(i) for i in range(17)]}, "stop.stop_strings", "16"),
]

BAD_OUTPUT: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 21}, "output.logprobs", "20"),
    ({"logprobs": 4_000_000_000}, "output.logprobs", "20"),
    ({"prompt_logprobs": 21}, "output.prompt_logprobs", "20"),
]


@pytest.mark.parametrize(("fields", "field", "limit"), BAD_SAMPLING)
def test_bad_sampling(fields: dict[str, Any], field: str, limit: str) -> None:
    refused(InvalidInput, field, limit, sampling=pb.SamplingParams(**fields))


@pytest.mark.parametrize(("fields", "field", "limit"), BAD_STOP)
def test_bad_stop_conditions(fields: dict[str, Any], field: str, limit: str) -> None:
    refused(InvalidInput, field, limit, stop=pb.StopConditions(**fields))


@pytest.mark.parametrize(("fields", "field", "limit"), BAD_OUTPUT)
def test_bad_output_options(fields: dict[str, Any], field: str, limit: str) -> None:
    refused(InvalidInput, field, limit, output=pb.OutputOptions(**fields))


def refused(kind: type[StepwireError], field: str, limit: str, limits: Limits = LIMITS, **fields: Any) -> None:
    with pytest.raises(kind) as caught:
        check(limits, **fields)
    assert caught.value.field == field
    assert caught.value.limit == limit
    assert field.split("[", 1)[0] in caught.value.message or limits is not LIMITS


@pytest.mark.parametrize(
    ("request_id", "limit"), [("x" * 129, "128"), ("é" * 65, "128"), ("a b", ""), ("a\n", ""), ("ü", "")]
)
def test_bad_request_ids(request_id: str, limit: str) -> None:
    refused(InvalidInput, "request_id", limit, request_id=request_id)


def test_a_request_id_is_drawn_when_none_is_given() -> None:
    assert check().request_id != check().request_id
    assert check(request_id="mine-1.2:3/4").request_id == "mine-1.2:3/4"


def test_cache_salt_is_bounded() -> None:
    assert check(cache_salt="tenant").cache_salt == b"tenant"
    refused(InvalidInput, "cache_salt", "256", cache_salt="x" * 257)


def test_edges_are_taken() -> None:
    sampling(temperature=100.0, top_p=1.0, min_p=1.0, repetition_penalty=10.0)
    sampling(presence_penalty=-2.0, frequency_penalty=2.0)
    good = sampling(logit_bias={999: -100.0}, allowed_token_ids=[999, 0, 0]).sampling
    assert good.bias == ((999, -100.0),) and good.allowed_ids == (0, 999)
    assert check(stop=pb.StopConditions(max_tokens=1, min_tokens=1)).sampling.min_tokens == 1


def test_documented_defaults() -> None:
    valid = check()
    values = valid.sampling
    assert (values.temperature, values.top_k, values.top_p, values.min_p) == (1.0, 0, 1.0, 0.0)
    assert (values.repetition_penalty, values.presence_penalty, values.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (values.max_tokens, values.min_tokens, values.ignore_eos, values.num_logprobs) == (0, 0, False, 0)
    assert valid.stream and valid.detokenize and not valid.raw_logits


def test_the_models_defaults_stand_between() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.9)
    values = check(defaults=defaults, sampling=pb.SamplingParams(top_k=0)).sampling
    assert (values.temperature, values.top_k, values.top_p, values.min_p) == (0.6, 0, 0.9, 0.0)


def test_a_seed_is_always_there() -> None:
    assert sampling(seed=0).sampling.seed == 0
    assert sampling(seed=2**64 - 1).sampling.seed == 2**64 - 1
    drawn = {check().sampling.seed for _ in range(8)}
    assert len(drawn) == 8 and all(0 <= seed < 2**64 for seed in drawn)


def test_hardly_any_temperature_is_greedy() -> None:
    assert sampling(temperature=1e-30).sampling.temperature == 0.0


def test_absurd_lengths_are_capped_not_overflowed() -> None:
    assert check(stop=pb.StopConditions(max_tokens=2**32 - 1)).sampling.max_tokens == 2**31 - 1
    assert sampling(top_k=2**32 - 1).sampling.top_k == 1000


def test_logprobs_count_the_chosen_token() -> None:
    values = check(output=pb.OutputOptions(logprobs=0, prompt_logprobs=20)).sampling
    assert (values.num_logprobs, values.num_prompt_logprobs, values.prompt_logprobs_from) == (1, 21, 1)


def test_min_tokens_must_leave_a_token_to_choose() -> None:
    limits = replace(LIMITS, eos_ids=(2, 3))

    def asks(allowed: list[int], **stop: Any) -> dict[str, Any]:
        return {"sampling": pb.SamplingParams(allowed_token_ids=allowed), "stop": pb.StopConditions(**stop)}

    refused(InvalidInput, "sampling.allowed_token_ids", "1", limits, **asks([2, 3], min_tokens=1))
    refused(InvalidInput, "sampling.allowed_token_ids", "1", limits, **asks([3, 9], min_tokens=1, stop_token_ids=[9]))
    for good in (asks([2, 3]), asks([2, 3], min_tokens=1, ignore_eos=True), asks([3, 9], min_tokens=5)):
        assert check(limits, **good).sampling.allowed_ids
    tiny = replace(limits, vocab_size=4)
    refused(InvalidInput, "sampling.allowed_token_ids", "1", tiny, **asks([], min_tokens=1, stop_token_ids=[0, 1]))


def test_a_tenant_s_name_is_bounded() -> None:
    assert check(tenant="é" * 64).tenant == "é" * 64 and check().tenant == ""
    refused(InvalidInput, "tenant", "128", tenant="é" * 64 + "x")


def test_repeated_stops_count_once() -> None:
    valid = check(stop=pb.StopConditions(stop_strings=["a"] * 20, stop_token_ids=[7] * 100))
    assert valid.stop_strings == ("a",) and valid.sampling.stop_ids == (7,)


def test_features_the_executor_lacks() -> None:
    limits = Limits(1000, 2048, 2000, frozenset(), True, 1 << 24)
    refused(NotSupported, "output.raw_logits", "", limits, output=pb.OutputOptions(raw_logits=True))
    refused(NotSupported, "output.prompt_logprobs", "", limits, output=pb.OutputOptions(prompt_logprobs=1))


def test_without_a_tokenizer() -> None:
    limits = Limits(1000, 2048, 2000, frozenset(), False, 1 << 24)
    assert not check(limits).detokenize
    refused(NotSupported, "output.detokenize", "", limits, output=pb.OutputOptions(detokenize=True))
    refused(NotSupported, "stop.stop_strings", "", limits, stop=pb.StopConditions(stop_strings=["a"]))


def test_stop_strings_need_text() -> None:
    stop = pb.StopConditions(stop_strings=["a"])
    refused(InvalidInput, "stop.stop_strings", "", output=pb.OutputOptions(detokenize=False), stop=stop)


def test_an_answer_that_can_not_fit_one_message_is_refused_before_it_is_computed() -> None:
    wants = pb.OutputOptions(raw_logits=True)
    small = Limits(1000, 2048, 2000, LIMITS.features, True, 1 << 20)
    refused(TooLarge, "stream", str(1 << 20), small, stream=False, output=wants)
    assert check(stream=False, output=wants, stop=pb.StopConditions(max_tokens=10)).raw_logits
    assert check(stream=True, output=wants).raw_logits


def test_logits_that_can_not_fit_a_message_at_all() -> None:
    limits = Limits(100_000, 2048, 2000, LIMITS.features, True, 65_536)
    refused(TooLarge, "output.raw_logits", "65536", limits, output=pb.OutputOptions(raw_logits=True))
