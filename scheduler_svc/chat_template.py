"""Chat templates: Jinja in a sandbox, with the helpers models' templates are written for."""

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidInput

# Loop turns and macro calls one rendering may take; a conversation of thousands of messages needs far fewer.
MAX_TICKS = 50_000
_ticks: ContextVar[int] = ContextVar("chat_template_ticks", default=0)


class ChatTemplate:
    """One compiled template. Stateless: any thread may render."""

    def __init__(self, source: str, field: str = "chat.template") -> None:
        """`field` is named in errors. Raises InvalidInput when `source` is no template."""
        self.source = source
        self._field = field
        self._template = _compile(source, field)

    def render(self, messages: Sequence[Mapping[str, str]], **variables: Any) -> str:
        """The conversation as text, special tokens spelled out. `variables`: add_generation_prompt, bos_token, ….

        Raises InvalidInput with the template's own words when it refuses the messages or fails.
        """
        before = _ticks.set(0)
        try:
            return self._template.render(messages=list(messages), **variables)
        except jinja2.TemplateError as error:
            raise InvalidInput(f"the chat template refused the messages: {error}", field=self._field) from error
        except RecursionError as error:
            raise InvalidInput("the chat template calls itself without end", field=self._field) from error
        # A template is a program of its own: wrong types, missing keys, division by zero.
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError) as error:
            text = f"the chat template failed: {type(error).__name__}: {error}"
            raise InvalidInput(text, field=self._field) from error
        finally:
            _ticks.reset(before)


class _Budget(jinja2.ext.Extension):
    """Counts loop turns and macro calls of the rendering in this thread: a template whose
    loops do not end is stopped. What one expression does is not bounded: callers' own templates are off by default.

    Not a variable of the template, which could set it to something else.
    """

    def watch(self, tree: jinja2.nodes.Template) -> None:
        """Puts a call of `tick` in front of every loop's and macro's body."""
        bodies = [(node.body, node.lineno) for node in tree.find_all(jinja2.nodes.For)]
        bodies += [(node.body, node.lineno) for node in tree.find_all(jinja2.nodes.Macro)]
        for body, line in bodies:
            body.insert(0, jinja2.nodes.Output([self.call_method("tick", lineno=line)], lineno=line))

    def tick(self) -> str:
        ticks = _ticks.get() + 1
        if ticks > MAX_TICKS:
            raise jinja2.TemplateRuntimeError(f"more than {MAX_TICKS} loop turns")
        _ticks.set(ticks)
        return ""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@lru_cache(maxsize=64)
def _compile(source: str, field: str) -> jinja2.Template:
    environment = _environment()
    try:
        tree = environment.parse(source)
        _Budget(environment).watch(tree)
        tree.set_environment(environment)
        code = environment.compile(tree)
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        raise InvalidInput(f"not a chat template: {error}", field=field) from error


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Budget, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not jinja2's own filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
