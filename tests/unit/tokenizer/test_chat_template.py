"""Chat templates do what models' templates need and nothing a stranger's template could abuse."""

import pytest

from common.errors import InvalidInput
from scheduler_svc.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<b>&ä"}, {"role": "assistant", "content": "yes"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(MESSAGES, **variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.role }}={{ m['content'] }};{% endfor %}", "user=<b>&ä;assistant=yes;"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "yes"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>&ä"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "yes!"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ f(2) }}", "[1][2]"),
        ("{{ missing }}{{ tools is none }}{{ bos_token }}", "True<s>"),
    ],
)
def test_what_models_templates_use_works(source: str, text: str) -> None:
    assert render(source, bos_token="<s>", tools=None) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "not a chat template"),
        ("{{ messages[0].absent.deeper }}", "absent"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0] + 1 }}", "TypeError"),
        ("{{ messages | nothing }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "chat template"),
        ("{% include 'x' %}", "chat template"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "loop turns"),
        (
            "{% set tick = 0 %}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "loop turns",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "loop turns",
        ),
    ],
)
def test_what_a_template_must_not_do_is_the_callers_error(source: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        text = render(source)
        # Reaching into Python's classes yields an undefined value, which renders as nothing.
        assert text == ""
        raise InvalidInput("chat template rendered nothing", field="chat.template")
    assert caught.value.field == "chat.template"


def test_each_rendering_has_its_own_budget() -> None:
    template = ChatTemplate("{% for a in range(40000) %}{% endfor %}ok")
    assert [template.render(MESSAGES) for _ in range(4)] == ["ok"] * 4


def test_the_messages_are_not_changed() -> None:
    before = [dict(message) for message in MESSAGES]
    with pytest.raises(InvalidInput):
        render("{% set _ = messages[0].update({'role': 'x'}) %}")
    assert before == MESSAGES
