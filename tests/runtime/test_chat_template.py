"""Chat templates of published models say what transformers makes of them; hostile ones get nowhere."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dflash_core.errors import UsageError
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from runtime.text import CoreText

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "smollm2-135m"
PUBLISHED = ROOT / "tests" / "fixtures" / "chat_templates"
CONFIG = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
TURNS = """{%- set ns = namespace(system='none', last=-1) %}
{%- macro show(role, text) %}{{ '<' + role + '>' + text | trim + '</' + role + '>' }}{% endmacro %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}
{%- for message in messages[::-1] %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}
{%- endfor %}
system {{ ns.system }} last {{ ns.last }} {{ 'tools' if tools is none }} {{ 'documents' if documents is none }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- show(message.role, message.content.split('</think>')[-1].lstrip('\\n')) }}{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<assistant>
{% endif %}
"""
JSON = ("{% for m in messages %}{% set d = {'z': m.content, 'a': [m.role, none, 0.5]} %}{{ d | tojson }}"
        "{{ d | tojson(indent=2) }}{{ d | tojson(separators=(',', ':'), sort_keys=true) }}"
        "{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}{{ bos_token }}{{ eos_token }}")
TRAINING = """{% for m in messages %}
  {% if m.role == 'assistant' %}
    {%- generation %}
    {{ m.content }}
    {%- endgeneration %}
  {% else %}{{ m.content }}{% endif %}
{% endfor %}{{ dict(a=1) | tojson }}{{ dict.fromkeys('ab', 0) | tojson }}"""
TEMPLATES = {
    "SmolLM2": (EXAMPLE / "chat_template.jinja").read_text("utf-8"),
    **{path.stem: path.read_text("utf-8") for path in sorted(PUBLISHED.glob("*.jinja"))},
    "namespaces, macros, loop controls": TURNS, "tojson": JSON, "generation blocks": TRAINING,
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "Hi."}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n\n"}],
    "three turns": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nx</think>\nb"},
                    {"role": "user", "content": "ünï 'quoted' \"double\" <tag> & {{ x }} 日本 \U0001f363 <|im_end|>"}],
    "the assistant speaks last": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, "}],
    "reasoning": [{"role": "user", "content": "2 + 2?"},
                  {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
                  {"role": "user", "content": "And 3 + 3?"}],
    "tools": [{"role": "user", "content": "Weather in Bern?"},
              {"role": "assistant", "content": "I look.", "tool_calls": [
                  {"id": "call_1", "type": "function",
                   "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}]},
              {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "rain & 4 °C"},
              {"role": "tool", "tool_call_id": "call_2", "name": "clock", "content": "noon"},
              {"role": "user", "content": "Thanks."}],
}
REFUSED = {("kimi-k2-thinking", "tools")}
"""It appends to a list, which the sandbox of transformers forbids as ours does."""


def core_text(template: str | None = None, tokenizer: Path | None = None, **config: Any) -> CoreText:
    """The text side of a core with this template."""
    spelled = Tokenizer(WordLevel({})).to_str().encode() if tokenizer is None else tokenizer.read_bytes()
    files = {"tokenizer.json": spelled, "tokenizer_config.json": json.dumps({**CONFIG, **config}).encode()}
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    core: Any = SimpleNamespace(file=files.get, manifest=SimpleNamespace(core_name="text"))
    return CoreText(core)


@cache
def demo_text(template: str) -> CoreText:
    """One of TEMPLATES with the demo's tokenizer, which takes a while to read."""
    return core_text(TEMPLATES[template], EXAMPLE / "tokenizer.json")


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(EXAMPLE / "tokenizer.json")),
                                   bos_token="<|im_start|>", eos_token="<|im_end|>")


@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["prompted", "as it is"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_conversation_is_rendered_as_transformers_renders_it(
    reference: PreTrainedTokenizerFast, template: str, conversation: str, add_generation_prompt: bool
) -> None:
    messages, source, text = CONVERSATIONS[conversation], TEMPLATES[template], demo_text(template)

    def expected(tokenize: bool) -> Any:
        return reference.apply_chat_template(messages, chat_template=source, tokenize=tokenize, return_dict=False,
                                             add_generation_prompt=add_generation_prompt)

    if (template, conversation) in REFUSED:
        with pytest.raises(TemplateError):
            expected(tokenize=False)
        with pytest.raises(UsageError, match="does not accept this conversation"):
            text.render_chat(messages)
        return
    assert text.render_chat(messages, add_generation_prompt=add_generation_prompt) == expected(tokenize=False)
    assert text.encode_chat(messages, add_generation_prompt=add_generation_prompt) == list(expected(tokenize=True))


def test_published_templates_say_what_their_models_were_trained_on() -> None:
    """Literals, so that an error shared with the reference is seen as well."""
    messages = CONVERSATIONS["system"]

    said = {name: core_text(TEMPLATES[name]).render_chat(messages) for name in ("SmolLM2", "qwen3", "kimi-k2")}

    assert said == {
        "SmolLM2": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?\n\n<|im_end|>\n"
                   "<|im_start|>assistant\n",
        "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?\n\n<|im_end|>\n"
                 "<|im_start|>assistant\n",
        "kimi-k2": "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Why?\n\n<|im_end|>"
                   "<|im_assistant|>assistant<|im_middle|>"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"chat_template": "inline {{ messages[0].content }}"}, "inline Hi."),
        ({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}, "d"),
    ],
    ids=["text", "named"],
)
def test_template_of_the_tokenizer_config_is_used(config: dict[str, Any], said: str) -> None:
    assert core_text(**config).render_chat(CONVERSATIONS["one turn"]) == said


@pytest.mark.parametrize("config", [{}, {"chat_template": [{"name": "rag", "template": "r"}]}, {"chat_template": 3}])
def test_a_model_without_a_template_has_no_chat(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        core_text(**config).render_chat(CONVERSATIONS["one turn"])

    assert refused.value.code == "NO_CHAT_TEMPLATE"


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("{{ raise_exception('only three roles') }}", "only three roles"),
        ("{{ messages[0].content + 1 }}", "TypeError"), ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content }}", "has no element 7"), ("{% if %}", "Expected an expression"),
        ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}", "RecursionError"),
        ("{{ range(10 ** 9) | length }}", "OverflowError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{{ (strftime_now | attr('__code__')).co_names }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"), ("{{ messages[0].update(role='system') }}", "unsafe"),
        ("{% include 'chat_template.jinja' %}", "no loader"),
        ("{% import '/etc/hostname' as x %}", "no loader"),
    ],
)
def test_what_a_template_may_not_do_is_a_refusal(template: str, got: str) -> None:
    with pytest.raises(UsageError) as refused:
        core_text(template).render_chat(CONVERSATIONS["one turn"])

    assert refused.value.code == "CHAT_TEMPLATE"
    assert got in refused.value.got
    assert CONVERSATIONS["one turn"] == [{"role": "user", "content": "Hi."}]


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception.__globals__ }}", "{{ messages[0].__class__ }}", "{{ self._TemplateReference__context }}",
     "{{ '{0.__class__}'.format(1) }}", "{{ ('{0.__class__}' | attr('format'))(1) }}",
     "{{ messages | map(attribute='__class__') | join }}", "{{ namespace(__class__=1).__class__ }}"],
)
def test_what_leads_out_of_the_sandbox_is_not_there(template: str) -> None:
    assert core_text(template).render_chat(CONVERSATIONS["one turn"]) == ""
