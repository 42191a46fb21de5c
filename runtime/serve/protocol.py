"""What clients may ask: the bodies of OpenAI's two completion calls, as far as this server honours them.

Nothing is ignored silently: a parameter that is known but not supported passes only with the value that changes
nothing, and an unknown one is refused by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator, model_validator

from runtime.engine import MAX_TOP_LOGPROBS, Request
from runtime.serve.errors import ApiError
from runtime.serve.settings import MAX_STOP_CHARS, MAX_STOP_STRINGS

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1, None), "best_of": (1, None), "presence_penalty": (0, None), "frequency_penalty": (0, None),
    "repetition_penalty": (1, None), "min_p": (0, None), "logit_bias": (None, {}), "suffix": (None, ""),
    "echo": (False, None), "response_format": (None, {"type": "text"}), "tools": (None, []), "functions": (None, []),
    "tool_choice": (None, "none", "auto"), "function_call": (None, "none", "auto"), "modalities": (None, ["text"]),
    "audio": (None,), "service_tier": (None, "auto", "default"), "store": (None, False), "prediction": (None,),
    "reasoning_effort": (None,), "web_search_options": (None,), "parallel_tool_calls": (None, True, False),
    "metadata": (None, {}),
}
"""Parameters of OpenAI's and vLLM's calls that are not supported, and the values with which they ask for nothing."""

UNUSED = ("user", "safety_identifier", "prompt_cache_key")
"""Parameters that name the caller and change no answer."""

EMPTY_IN_MESSAGES = ("refusal", "audio", "annotations", "function_call")
"""Fields of a message in OpenAI's answers that pass when they are empty."""

Temperature = Annotated[float, Field(ge=0, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """What a stream carries beside the text; `include_steps` adds how each token came and what the step took."""

    include_usage: StrictBool = False
    include_steps: StrictBool = False


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ImageUrl(_Body):
    url: str
    detail: str | None = None


class ImagePart(_Body):
    type: Literal["image_url"]
    image_url: ImageUrl


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(_Body):
    """One turn. Beside its text it holds what chat templates read: earlier tool calls and their answers, reasoning."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_validator(mode="before")
    @classmethod
    def _empty_fields_say_nothing(cls, value: Any) -> Any:
        """An answer's message may be sent back as it came, with what this server leaves null."""
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if name not in EMPTY_IN_MESSAGES or item not in (None, [])}

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """Its images, in order."""
        return tuple(part for part in self.content if isinstance(part, ImagePart)) if isinstance(self.content, list) \
            else ()

    def document(self, image_texts: Iterator[str]) -> dict[str, Any]:
        """The message as a chat template takes it: one text, no nulls, a call's arguments as an object.

        Args:
            image_texts: what stands for each of the conversation's images, in order; this message's are taken from it.
        Raises:
            ApiError: 400 for a message that says nothing; for arguments that are no JSON object.
        """
        if self.content is None and not self.tool_calls:
            raise ApiError.bad_request("a message needs content", param="messages")
        found: dict[str, Any] = {"role": self.role, "content": self._text(image_texts)}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": call.type,
                 "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
                for call in self.tool_calls]
        return found

    def _text(self, image_texts: Iterator[str]) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text if isinstance(part, TextPart) else next(image_texts) for part in self.content)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError.bad_request("the arguments of a tool call must be a JSON object", param="messages")
    return value


class SamplingBody(_Body):
    """What both calls share."""

    model: str
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool = False
    speculation: StrictBool = True

    @field_validator("temperature", "top_p", mode="before")
    @classmethod
    def _whole_numbers_are_numbers(cls, value: Any) -> Any:
        return float(value) if type(value) is int and abs(value) < 2**53 else value

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def request(self, max_tokens: int, stop_token_ids: tuple[int, ...], top_logprobs: int | None) -> Request:
        """The engine's request; without a seed, one is drawn."""
        top_k = self.top_k or 0
        return Request(
            max_tokens=max_tokens, temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p, top_k=max(top_k, 0),
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**64,
            stop_token_ids=() if self.ignore_eos else stop_token_ids, speculation=self.speculation,
            top_logprobs=top_logprobs)


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: StrictBool = True
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", bound=SamplingBody)


def parse_body(kind: type[Body], document: Any) -> Body:
    """Read a body.

    Raises:
        ApiError: 400 that names the first parameter at fault.
    """
    if not isinstance(document, dict):
        raise ApiError.bad_request("the body must be a JSON object")
    kept = {}
    for name, value in document.items():
        if name in UNUSED:
            continue
        if name in NEUTRAL:
            if not any(type(value) in (type(allowed), float) and value == allowed for allowed in NEUTRAL[name]):
                raise ApiError.bad_request(f"{name} is not supported by this server", param=name,
                                           code="unsupported_parameter")
            continue
        kept[name] = value
    try:
        body = kind.model_validate(kept)
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ApiError.bad_request(f"{place}: {first['msg']}", param=str(first["loc"][0]) if first["loc"] else None,
                                   code="unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value"
                                   ) from e
    if body.stream_options is not None and not body.stream:
        raise ApiError.bad_request("stream_options goes with stream", param="stream_options")
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise ApiError.bad_request("top_logprobs goes with logprobs", param="top_logprobs")
    return body
