"""What a caller may ask for: every field of a GenerateRequest against its documented range.

Everything here is synchronous and cheap; the prompt itself (tokenising, its length) is `prompt.py`'s. Ranges and
defaults stand in inference.proto; each refusal names the field and the limit. Narrower than they read there: a
temperature below 1e-5 is greedy, and a repetition penalty below 0.01 is refused (both only ever meant overflow).
"""

import math
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from common.errors import InvalidInput, NotSupported, TooLarge
from common.messages import U32, Sampling, u32
from common.model_files.description import SamplingDefaults
from scheduler_svc.api.served_model import MIN_REPETITION_PENALTY
from stepwire.v1 import inference_pb2 as pb

MAX_REQUEST_ID_BYTES: Final = 128
MAX_CACHE_SALT_BYTES: Final = 256
MAX_TENANT_BYTES: Final = 128
MAX_LOGIT_BIAS: Final = 1024
MAX_STOP_IDS: Final = 64
MAX_CHOICES: Final = 64
MAX_LISTED_IDS: Final = 1_000_000
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_TOKENS: Final = 2**31 - 1
GREEDY_BELOW: Final = 1e-5

# Rough sizes on the wire, for what must fit into one message.
_TOP_BYTES: Final = 16
_TOKEN_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server can do now. `features`, `eos_ids`: of the executor. `max_message_bytes`: of one response."""

    vocab_size: int
    max_context: int
    max_prompt_tokens: int
    features: frozenset[str]
    has_tokenizer: bool
    max_message_bytes: int
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A GenerateRequest found good, but for its prompt. `sampling.max_tokens` 0: as far as the context allows."""

    request_id: str
    sampling: Sampling
    stop_strings: tuple[str, ...]
    num_choices: int
    stream: bool
    detokenize: bool
    raw_logits: bool
    priority: int
    cache_salt: bytes
    tenant: str


def validate(request: pb.GenerateRequest, defaults: SamplingDefaults, limits: Limits) -> ValidRequest:
    """Raises InvalidInput (TooLarge, NotSupported), naming field and limit."""
    detokenize = _detokenize(request, limits)
    stream = request.stream if request.HasField("stream") else True
    raw_logits = request.output.raw_logits
    sampling = resolve_sampling(request, defaults, limits)
    _can_go_on(sampling, limits)
    if raw_logits:
        _feature(limits, "raw_logits", "output.raw_logits")
        if limits.vocab_size * 4 + _TOKEN_BYTES > limits.max_message_bytes:
            raise TooLarge(
                f"output.raw_logits: one token's logits have {limits.vocab_size * 4} bytes, more than a message may",
                field="output.raw_logits",
                limit=str(limits.max_message_bytes),
            )
    if not stream:
        _fits_one_message(sampling, raw_logits, limits)
    return ValidRequest(
        request_id=request_id(request.request_id),
        sampling=sampling,
        stop_strings=_stop_strings(request.stop.stop_strings, detokenize, limits),
        num_choices=_num_choices(request),
        stream=stream,
        detokenize=detokenize,
        raw_logits=raw_logits,
        priority=request.priority,
        cache_salt=_cache_salt(request.cache_salt),
        tenant=_tenant(request.tenant),
    )


def request_id(asked: str) -> str:
    """The caller's id, or one drawn."""
    if not asked:
        return f"req-{secrets.token_hex(16)}"
    if len(asked.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidInput(
            f"request_id is longer than {MAX_REQUEST_ID_BYTES} bytes",
            field="request_id",
            limit=str(MAX_REQUEST_ID_BYTES),
        )
    if not all("!" <= character <= "~" for character in asked):
        raise InvalidInput("request_id may hold printable ASCII without spaces only", field="request_id")
    return asked


def _num_choices(request: pb.GenerateRequest) -> int:
    number = request.n if request.HasField("n") else 1
    if not 1 <= number <= MAX_CHOICES:
        limit = f"[1, {MAX_CHOICES}]"
        raise InvalidInput(f"n is {number}, it must be in {limit}", field="n", limit=limit)
    return number


def resolve_sampling(request: pb.GenerateRequest, defaults: SamplingDefaults, limits: Limits) -> Sampling:
    """The caller's values, else the model's, else the documented ones. Always with a seed."""
    params, stop, output = request.sampling, request.stop, request.output
    max_tokens, min_tokens = _token_limits(stop)
    temperature = _float(params, "temperature", defaults.temperature, 1.0, 0.0, 100.0)
    return Sampling(
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=min(_int(params, "top_k", defaults.top_k, 0), limits.vocab_size),
        top_p=_float(params, "top_p", defaults.top_p, 1.0, 0.0, 1.0, above=True),
        min_p=_float(params, "min_p", defaults.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=_float(
            params, "repetition_penalty", defaults.repetition_penalty, 1.0, MIN_REPETITION_PENALTY, 10.0
        ),
        presence_penalty=_float(params, "presence_penalty", None, 0.0, -2.0, 2.0),
        frequency_penalty=_float(params, "frequency_penalty", None, 0.0, -2.0, 2.0),
        min_tokens=min_tokens,
        stop_ids=_token_ids(stop.stop_token_ids, "stop.stop_token_ids", limits, MAX_STOP_IDS),
        ignore_eos=stop.ignore_eos,
        bias=_logit_bias(params, limits),
        allowed_ids=tuple(
            sorted(_token_ids(params.allowed_token_ids, "sampling.allowed_token_ids", limits, limits.vocab_size))
        ),
        num_logprobs=_logprobs(output, "logprobs"),
        num_prompt_logprobs=_prompt_logprobs(output, limits),
        prompt_logprobs_from=1 if output.HasField("prompt_logprobs") else 0,
    )


def check_token_ids(token_ids: U32, field: str, vocab_size: int) -> None:
    """Raises InvalidInput naming the first id outside the vocabulary."""
    outside = np.flatnonzero(token_ids >= vocab_size)
    if len(outside):
        index = int(outside[0])
        raise InvalidInput(
            f"{field}[{index}] is {token_ids[index]}, the vocabulary has {vocab_size} tokens",
            field=f"{field}[{index}]",
            limit=str(vocab_size - 1),
        )


def _float(
    params: pb.SamplingParams,
    name: str,
    model: float | None,
    default: float,
    low: float,
    high: float,
    above: bool = False,
) -> float:
    """A value in [low, high], or (low, high] with `above`. Comparisons are false for NaN, so it is refused as well."""
    if not params.HasField(name):  # type: ignore[arg-type]
        return default if model is None else model
    value = float(getattr(params, name))
    if math.isfinite(value) and low <= value <= high and not (above and value == low):
        return value
    limit = f"{'(' if above else '['}{low:g}, {high:g}]"
    raise InvalidInput(f"sampling.{name} is {value:g}, it must be in {limit}", field=f"sampling.{name}", limit=limit)


def _int(params: pb.SamplingParams, name: str, model: int | None, default: int) -> int:
    if params.HasField(name):  # type: ignore[arg-type]
        return int(getattr(params, name))
    return default if model is None else model


def _token_limits(stop: pb.StopConditions) -> tuple[int, int]:
    max_tokens = 0
    if stop.HasField("max_tokens"):
        if stop.max_tokens < 1:
            raise InvalidInput("stop.max_tokens must be at least 1", field="stop.max_tokens", limit="1")
        max_tokens = min(stop.max_tokens, MAX_TOKENS)
    if max_tokens and stop.min_tokens > max_tokens:
        raise InvalidInput(
            f"stop.min_tokens is {stop.min_tokens}, above stop.max_tokens {max_tokens}",
            field="stop.min_tokens",
            limit=str(max_tokens),
        )
    return max_tokens, min(stop.min_tokens, MAX_TOKENS)


def _token_ids(ids: Collection[int], field: str, limits: Limits, most: int) -> tuple[int, ...]:
    unique = tuple(dict.fromkeys(ids)) if len(ids) <= MAX_LISTED_IDS else ids  # repeated ones count once
    if len(unique) > most:
        raise InvalidInput(f"{field} has {len(unique)} ids, at most {most} are taken", field=field, limit=str(most))
    check_token_ids(u32(unique), field, limits.vocab_size)
    return tuple(unique)


def _logit_bias(params: pb.SamplingParams, limits: Limits) -> tuple[tuple[int, float], ...]:
    bias = params.logit_bias
    field = "sampling.logit_bias"
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidInput(f"{field} has {len(bias)} entries", field=field, limit=str(MAX_LOGIT_BIAS))
    for token_id, value in bias.items():
        if token_id >= limits.vocab_size:
            raise InvalidInput(
                f"{field}[{token_id}]: the vocabulary has {limits.vocab_size} tokens",
                field=f"{field}[{token_id}]",
                limit=str(limits.vocab_size - 1),
            )
        if not -100.0 <= value <= 100.0:
            raise InvalidInput(
                f"{field}[{token_id}] is {value:g}, it must be in [-100, 100]",
                field=f"{field}[{token_id}]",
                limit="[-100, 100]",
            )
    return tuple(sorted(bias.items()))


def _logprobs(output: pb.OutputOptions, name: str) -> int:
    """As Sampling wants it: 0 none, k + 1 for the chosen and the k most likely."""
    if not output.HasField(name):  # type: ignore[arg-type]
        return 0
    value = int(getattr(output, name))
    if value > MAX_LOGPROBS:
        raise InvalidInput(
            f"output.{name} is {value}, at most {MAX_LOGPROBS} are given",
            field=f"output.{name}",
            limit=str(MAX_LOGPROBS),
        )
    return value + 1


def _prompt_logprobs(output: pb.OutputOptions, limits: Limits) -> int:
    number = _logprobs(output, "prompt_logprobs")
    if number:
        _feature(limits, "prompt_logprobs", "output.prompt_logprobs")
    return number


def _feature(limits: Limits, feature: str, field: str) -> None:
    if feature not in limits.features:
        raise NotSupported(f"{field}: the executor does not offer {feature!r}", field=field)


def _detokenize(request: pb.GenerateRequest, limits: Limits) -> bool:
    asked = request.output.HasField("detokenize")
    wanted = request.output.detokenize if asked else True
    if limits.has_tokenizer:
        return wanted
    if asked and wanted:
        raise NotSupported("this server has no tokenizer: only token ids come out", field="output.detokenize")
    return False


def _stop_strings(strings: Iterable[str], detokenize: bool, limits: Limits) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(strings))
    field = "stop.stop_strings"
    if not unique:
        return ()
    if not limits.has_tokenizer:
        raise NotSupported("this server has no tokenizer: stop strings can not be found", field=field)
    if not detokenize:
        raise InvalidInput("stop.stop_strings need output.detokenize", field=field)
    if len(unique) > MAX_STOP_STRINGS:
        raise InvalidInput(f"{field} has {len(unique)} strings", field=field, limit=str(MAX_STOP_STRINGS))
    for index, string in enumerate(unique):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            raise InvalidInput(
                f"{field}[{index}] has {len(string)} characters, it must have 1 to {MAX_STOP_STRING_CHARS}",
                field=f"{field}[{index}]",
                limit=str(MAX_STOP_STRING_CHARS),
            )
    return unique


def _cache_salt(salt: str) -> bytes:
    data = salt.encode()
    if len(data) > MAX_CACHE_SALT_BYTES:
        raise InvalidInput(
            f"cache_salt is longer than {MAX_CACHE_SALT_BYTES} bytes",
            field="cache_salt",
            limit=str(MAX_CACHE_SALT_BYTES),
        )
    return data


def _tenant(tenant: str) -> str:
    if len(tenant.encode()) > MAX_TENANT_BYTES:
        raise InvalidInput(
            f"tenant is longer than {MAX_TENANT_BYTES} bytes", field="tenant", limit=str(MAX_TENANT_BYTES)
        )
    return tenant


def _can_go_on(sampling: Sampling, limits: Limits) -> None:
    """Under min_tokens EOS and stop ids are masked; some other token has to be left."""
    if not sampling.min_tokens:
        return
    masked = {*sampling.stop_ids, *(() if sampling.ignore_eos else limits.eos_ids)}
    if masked.issuperset(sampling.allowed_ids or range(limits.vocab_size)):
        field = "sampling.allowed_token_ids"
        raise InvalidInput(
            f"{field}: with stop.min_tokens {sampling.min_tokens} at least one has to be neither EOS nor a stop id",
            field=field,
            limit="1",
        )


def _fits_one_message(sampling: Sampling, raw_logits: bool, limits: Limits) -> None:
    """stream = false answers with one message; what can not fit into it is refused before it is computed."""
    max_tokens = min(sampling.max_tokens or limits.max_context, limits.max_context)
    size = max_tokens * (_TOKEN_BYTES + sampling.num_logprobs * _TOP_BYTES + raw_logits * limits.vocab_size * 4)
    if sampling.num_prompt_logprobs:
        size += limits.max_prompt_tokens * (_TOKEN_BYTES + sampling.num_prompt_logprobs * _TOP_BYTES)
    if size > limits.max_message_bytes:
        raise TooLarge(
            f"with stream = false the answer may reach {size} bytes; stream it or ask for fewer tokens",
            field="stream",
            limit=str(limits.max_message_bytes),
        )
