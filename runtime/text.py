"""Text in and out of a core: its own tokenizer, its chat template, and its stop tokens.

    text = CoreText(core)
    ids = text.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    stream = text.stream()
    print("".join(stream.push(token) for token in tokens))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dflash_core.errors import CompatibilityError, FormatError, UsageError
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders

from runtime.core import Core


class CoreText:
    """What a core knows about text; everything comes from files that its signers signed."""

    def __init__(self, core: Core) -> None:
        data = core.file("tokenizer.json")
        if data is None:
            raise CompatibilityError("NO_TOKENIZER", "the core carries no tokenizer", where=core.manifest.core_name,
                                     expected="tokenizer.json among the target's files",
                                     hint="export from a folder that holds tokenizer.json, or give token ids")
        try:
            self.tokenizer = Tokenizer.from_buffer(data)
        except Exception as e:  # the library raises bare Exception
            raise FormatError("TOKENIZER", "the core's tokenizer.json cannot be read", where="tokenizer.json",
                              got=str(e)) from e
        self._config = _json(core, "tokenizer_config.json")
        template = core.file("chat_template.jinja")
        inline = self._config.get("chat_template")
        self._template = template.decode() if template is not None else inline if isinstance(inline, str) else None
        self.stop_token_ids = _stop_tokens(core)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with whatever special tokens the tokenizer adds by itself.

        Raises:
            UsageError: TEXT; half of a surrogate pair, as bytes that are not UTF-8 become on a command line.
        """
        return self._ids(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: mappings with "role" and "content".
        Raises:
            UsageError: NO_CHAT_TEMPLATE, CHAT_TEMPLATE when the template refuses the messages, or TEXT.
        """
        return self._ids(self.render_chat(messages), special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UsageError("TEXT", "the text is not Unicode", where=f"character {e.start}", expected="UTF-8",
                             got=ascii(text[e.start]), hint="convert the text to UTF-8") from e
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the model's chat template spells it."""
        if self._template is None:
            raise UsageError("NO_CHAT_TEMPLATE", "the model has no chat template", where="chat_template in the core",
                             hint="leave out --chat")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **self._special_tokens())
        except TemplateError as e:
            raise UsageError("CHAT_TEMPLATE", "the chat template does not accept this conversation", got=str(e)) from e

    def _special_tokens(self) -> dict[str, str]:
        tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = self._config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stream(self) -> TextStream:
        return TextStream(self.tokenizer)


class TextStream:
    """Turns tokens into text as they come; text is held back until its bytes are whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = decoders.DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """The text that this token completes, often one word, sometimes nothing."""
        return self._decoder.step(self._tokenizer, token) or ""


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _json(core: Core, path: str) -> dict[str, Any]:
    data = core.file(path)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as e:
        raise FormatError("MODEL_FILE", "a model file in the core is not JSON", where=path, got=str(e)) from e
    return value if isinstance(value, dict) else {}


def _stop_tokens(core: Core) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json rules over config.json."""
    for path in ("generation_config.json", "config.json"):
        value = _json(core, path).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(v for v in value if isinstance(v, int))
    return ()
