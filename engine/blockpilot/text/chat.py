"""Chat templates, rendered in a sandbox, and the marking of control tokens that messages merely spell out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way to declare a statement)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's Jinja chat template, with the filters and functions transformers gives it.

    Templates come with checkpoints, so they run in Jinja's immutable sandbox.

    Args:
        source: the template. variables: special token literals it may use (`bos_token`, `eos_token`, …).

    Raises:
        ValueError: the template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.variables = dict(variables)
        try:
            self.template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the checkpoint's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt text up to where the assistant's answer begins.

        Args:
            messages: from `checked`: dictionaries with a "role" and mostly a "content", oldest first.

        Raises:
            ValueError: the template refuses them.
        """
        try:
            return self.template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self.variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused these messages: {error}") from error


def checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain copies of the messages without their None entries.

    Raises:
        ValueError: not a non-empty list of dictionaries of JSON values with a "role".
    """
    if not messages:
        raise ValueError('expected at least one message, such as {"role": "user", "content": "Hi"}, got none')
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f'expected messages like {{"role": "user", "content": "Hi"}}, got {message!r}')
    return [{k: map_strings(v, str) for k, v in message.items() if v is not None} for message in messages]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and dictionaries with every string, keys included, changed.

    Raises:
        ValueError: something that is not a JSON value; templates get no objects with methods of their own.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(k, change): map_strings(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ValueError(f"expected messages of JSON values (strings, lists, …), got {type(value).__name__}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models have not been trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
