"""Text in and out of a core: its own tokenizer, its chat template, and its stop tokens.

    text = CoreText(core)
    ids = text.encode_chat([{"role": "user", "content": "Why is the sky blue?"}])
    stream = text.stream()
    print("".join(stream.push(token) for token in tokens))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_core.errors import CompatibilityError, FormatError, UsageError
from tokenizers import Tokenizer, decoders

from runtime.chat_template import ChatTemplate
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
        source = _chat_template(core, self._config)
        self._template = None if source is None else ChatTemplate(source, _special_tokens(self._config))
        self.stop_token_ids = _stop_tokens(core)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with whatever special tokens the tokenizer adds by itself.

        Raises:
            UsageError: TEXT; half of a surrogate pair, as bytes that are not UTF-8 become on a command line.
        """
        return self._ids(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises as `render_chat`, and UsageError: TEXT."""
        return self._ids(self.render_chat(messages, add_generation_prompt=add_generation_prompt), special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UsageError("TEXT", "the text is not Unicode", where=f"character {e.start}", expected="UTF-8",
                             got=ascii(text[e.start]), hint="convert the text to UTF-8") from e
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's chat template spells it.

        Args:
            messages: mappings with "role" and "content", and whatever else the template reads ("tool_calls").
            add_generation_prompt: end with what begins the assistant's answer.
        Raises:
            UsageError: NO_CHAT_TEMPLATE; CHAT_TEMPLATE when the template refuses the messages.
        """
        if self._template is None:
            raise UsageError("NO_CHAT_TEMPLATE", "the model has no chat template", where="chat_template in the core",
                             hint="leave out --chat")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

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


def _chat_template(core: Core, config: Mapping[str, Any]) -> str | None:
    """The template's source: a file of its own, or an entry of tokenizer_config.json; among named ones, "default"."""
    data = core.file("chat_template.jinja")
    if data is not None:
        return data.decode()
    inline = config.get("chat_template")
    if isinstance(inline, list):
        inline = next((item.get("template") for item in inline
                       if isinstance(item, dict) and item.get("name") == "default"), None)
    return inline if isinstance(inline, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


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
