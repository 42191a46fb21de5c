"""Stop strings wherever pieces are cut, and chat templates rendered as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from runtime.serve.text import StopScanner
from runtime.text import CoreText

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "smollm2-135m"
TURNS = """{%- set ns = namespace(system='none', last=-1) %}
{%- macro show(role, text) %}{{ '<' + role + '>' + text | trim + '</' + role + '>' }}{% endmacro %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}
{%- set messages = messages[1:] %}{% endif %}
{%- for message in messages[::-1] %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}
{%- endfor %}
system {{ ns.system }} last {{ ns.last }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- show(message.role, message.content.split('</think>')[-1].lstrip('\\n')) }}{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
<assistant>
{% endif %}
"""
JSON = "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}{{ bos_token }}"


@pytest.mark.parametrize(
    ("pieces", "stops", "said", "matched"),
    [
        (["hello"], [], "hello", None), (["ab", "cd"], ["bc"], "a", "bc"), (["a", "b", "c"], ["abd"], "abc", None),
        (["x", "en", "d", "y"], ["end"], "x", "end"), (["aab"], ["ab"], "a", "ab"), (["aa", "ab"], ["aab"], "a", "aab"),
        (["one two"], ["two", "one"], "", "one"), (["abc"], ["abcd", "b"], "a", "b"), (["e", "n"], ["end"], "en", None),
        (["stop", "more"], ["stop"], "", "stop"), (["é", "n"], ["én"], "", "én"), (["ab"], ["a", "ab"], "", "ab"),
    ],
)
def test_stop_string_is_found_across_pieces(pieces, stops, said, matched) -> None:
    scanner = StopScanner(stops)

    text = "".join(scanner.push(piece) for piece in pieces) + scanner.flush()

    assert (text, scanner.matched) == (said, matched)


def test_nothing_that_could_begin_a_stop_string_is_said_early() -> None:
    scanner = StopScanner(["end", "nnn"])

    assert [scanner.push(piece) for piece in ("a", "e", "n", "n", "n")] == ["a", "", "", "e", ""]
    assert scanner.matched == "nnn"


def core_text(template: str) -> CoreText:
    """The text side of a core with the demo's tokenizer and this template."""
    files = {"tokenizer.json": (EXAMPLE / "tokenizer.json").read_bytes(), "chat_template.jinja": template.encode(),
             "tokenizer_config.json": json.dumps({"bos_token": "<|im_start|>"}).encode()}
    core: Any = SimpleNamespace(file=files.get, manifest=SimpleNamespace(core_name="text"))
    return CoreText(core)


CONVERSATIONS = [
    [{"role": "user", "content": "Hi."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nx</think>\nb"},
     {"role": "user", "content": "ünï 'quoted' \"double\" <tag> & {{ x }}"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one turn", "system", "three turns"])
@pytest.mark.parametrize("template", [(EXAMPLE / "chat_template.jinja").read_text(), TURNS, JSON],
                         ids=["SmolLM2", "namespaces, macros, loop controls", "tojson"])
def test_conversation_is_rendered_as_transformers_renders_it(template: str, messages: list[dict[str, str]]) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(EXAMPLE / "tokenizer.json")),
                                        bos_token="<|im_start|>")
    text = core_text(template)

    assert text.render_chat(messages) == reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert text.encode_chat(messages) == list(reference.apply_chat_template(
        messages, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False))
