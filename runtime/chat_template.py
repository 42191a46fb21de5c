"""A model's chat template, rendered as transformers renders it, in Jinja's sandbox.

    template = ChatTemplate(source, {"bos_token": "<s>"})
    template.render([{"role": "user", "content": "Why is the sky blue?"}], add_generation_prompt=True)

Templates are written for transformers and for what it gives them: a `tojson` that keeps characters as they are,
`raise_exception`, `strftime_now`, loop controls, `{% generation %}` blocks, and null for tools and documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dflash_core.errors import UsageError
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One template. It is compiled when it is first rendered; a template that is never used may be malformed."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source, self._special_tokens = source, dict(special_tokens)
        self._compiled: Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The conversation as text.

        Args:
            messages: plain data, as JSON knows it.
        Raises:
            UsageError: CHAT_TEMPLATE; the template refuses the messages, fails on them, or is malformed.
        """
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            return self._compiled.render(messages=messages, tools=None, documents=None,
                                         add_generation_prompt=add_generation_prompt, **self._special_tokens)
        except Exception as e:  # a template is a program: it may divide by zero as well as refuse
            refused = isinstance(e, TemplateError)
            raise UsageError("CHAT_TEMPLATE", "the chat template does not accept this conversation",
                             where="the core's chat template", got=str(e) if refused else f"{type(e).__name__}: {e}",
                             hint="use the roles and fields that the model's card names") from e


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON as transformers' filter writes it: Jinja's own escapes what HTML would read as markup."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` marks what training learns from; rendered, it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
