"""What must be true of a request when a history of the fleet is over."""

from common.errors import DeadlinePassed, Overloaded, SequenceFailed, TooLarge, Unavailable
from common.messages import OutputKind, Sampling
from scheduler_svc.messages import FinishReason
from tests.fakes.toy_tokens import expected_tokens
from tests.sim.fleet_setting import VOCAB, Setting
from tests.sim.harness import Client


def check_client(client: Client, setting: Setting, contexts: set[int]) -> None:
    """Exactly the undisturbed tokens, or a head of them where something ended the request before. `contexts`: limits
    there were."""
    request, s = client.submit, client.submit.sampling
    expected = _expected(client, setting, max(contexts))
    assert client.tokens == expected[: len(client.tokens)], f"request {request.key}"
    if client.error is not None:
        assert isinstance(client.error, SequenceFailed | TooLarge | DeadlinePassed | Overloaded | Unavailable)
    if client.reason is None:
        return
    check_extras(client)
    last, length = client.tokens[-1], len(client.tokens)
    if length > s.min_tokens and last == 2 and not s.ignore_eos:
        assert client.reason == FinishReason.EOS
    elif length > s.min_tokens and last in s.stop_ids:
        assert client.reason == FinishReason.STOP_TOKEN
    elif length == s.max_tokens:
        assert client.reason == FinishReason.MAX_TOKENS
    else:
        assert client.reason == FinishReason.CONTEXT and len(request.prompt) + length in contexts
    if client.reason != FinishReason.CONTEXT:
        assert client.tokens == expected


def _expected(client: Client, setting: Setting, max_context: int) -> list[int]:
    return expected_tokens(
        client.submit.prompt.tolist(),
        client.submit.sampling,
        vocab_size=VOCAB,
        eos_ids=(2,),
        eos_chance=setting.eos_chance,
        max_context=max_context,
    )


def check_extras(client: Client) -> None:
    """Of a request that finished: each wanted position came exactly once, whatever happened."""
    request, prompt = client.submit, len(client.submit.prompt)
    sampling: Sampling = request.sampling
    outputs = [o for extra in client.extras for o in extra.outputs]
    raw = [o.position for o in outputs if o.kind == OutputKind.RAW_LOGITS]
    assert raw == (list(range(prompt, prompt + len(client.tokens))) if request.raw_logits else [])
    prompts = [o for o in outputs if o.kind == OutputKind.PROMPT_LOGPROBS]
    wanted = [p for o in prompts for p in range(o.position, o.position + o.count)]
    assert wanted == (list(range(1, prompt)) if sampling.num_prompt_logprobs else [])
    tops = [t for extra in client.extras for t in extra.logprobs]
    assert len(tops) == (len(client.tokens) if sampling.num_logprobs else 0)
