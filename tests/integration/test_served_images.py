"""Images through the server: the official client's questions have the answers that the engine gives alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime import Engine, Request, TrustPolicy, load
from runtime.cli import app
from runtime.keys import generate_key, load_private_key
from runtime.serve import images as served_images
from runtime.vision.rows import PromptImages
from tests.oracles.drawn_images import drawn, jpeg_of, png_of
from tests.oracles.kimi_pair import K3, make_pair
from tests.oracles.zlab_pair import VOCAB, PairSpec
from tests.served_core import TEMPLATE, Server, running

PAD = K3["media_placeholder_token_id"]
SMALL, LARGE = png_of(drawn(56, 30)), jpeg_of(drawn(160, 90))
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny K3 that sees, its token n spelled " tn" and its placeholder as the family spells it."""
    made = tmp_path_factory.mktemp("sees")
    pair = make_pair(made, K3, PairSpec(block_size=4, fit_steps=0), lambda target, prompt: [])
    words = {"<|media_pad|>" if index == PAD else f"t{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("t", " t"), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|media_pad|>"])
    (pair.target_path / "tokenizer.json").write_text(tokenizer.to_str())
    (pair.target_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    generate_key(made / "keys")
    export(ExportRequest(
        target=pair.target_path, draft=pair.draft_path, out=made / "core", batches=(1, 4), core_name="tiny",
        settings=PrecisionSettings(online_mxfp8_scope="kda-input", draft_body="mxfp8", draft_head="nvfp4"),
        max_context=128, image_patches=(16, 128)), load_private_key(made / "keys" / "key.pem"))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(folder, record=folder / "records") as shared:
        yield shared


def uri(data: bytes) -> str:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def content(*parts: str | bytes) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else
            {"type": "image_url", "image_url": {"url": uri(part)}} for part in parts]


QUESTIONS = [content("t7 t8 ", SMALL, " t9"), content(LARGE, " t3"), content(SMALL, " t4 ", LARGE),
             content("t5 t6")]
# As TEMPLATE spells them, t1 t2 CONTENT t1 t4; of what surrounds a placeholder, "<|media_begin|>image",
# "WxH<|media_content|>" and "<|media_end|>" are words that the tokenizer does not know: t0.
IDS = [[1, 2, 7, 8, 0, 0, PAD, 0, 9, 1, 4], [1, 2, 0, 0, PAD, 0, 3, 1, 4],
       [1, 2, 0, 0, PAD, 0, 4, 0, 0, PAD, 0, 1, 4], [1, 2, 5, 6, 1, 4]]
FILES = [(SMALL,), (LARGE,), (SMALL, LARGE), ()]


def ask(server: Server, question: list[dict[str, Any]], **more: Any) -> Any:
    return server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": question}], max_tokens=COUNT, temperature=0,
        extra_body={"ignore_eos": True}, **more)


def test_answers_are_those_of_the_engine_alone_also_when_asked_at_once(server: Server, folder: Path) -> None:
    expected, lengths = [], []
    with load(folder / "core", trust=TrustPolicy.load(folder / "keys" / "trust.json")) as core:
        engine = Engine(core)
        for question, files in zip(IDS, FILES, strict=True):
            pictures = [engine.encoder.patches(file) for file in files]
            images = PromptImages.of(engine.encoder, question, pictures)
            tokens = engine.generate(images.prompt.tokens, Request(COUNT, speculation=False), images=images).tokens
            expected.append("".join(f" t{token}" for token in tokens if token != PAD))
            lengths.append(len(images.prompt.tokens))

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = list(pool.map(lambda question: ask(server, question), QUESTIONS))

    assert [answer.choices[0].message.content for answer in answers] == expected
    assert [answer.usage.prompt_tokens for answer in answers] == lengths
    assert len(set(expected)) == len(expected)


def test_a_streamed_answer_is_the_whole_one(server: Server) -> None:
    whole = ask(server, QUESTIONS[0]).choices[0].message.content

    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, QUESTIONS[0], stream=True)) == whole


BAD = [
    pytest.param("file:///etc/passwd", "image_uri", id="a file"),
    pytest.param("http://127.0.0.1:1/x.png", "image_uri", id="an address"),
    pytest.param("data:image/gif;base64,R0lGODlhAQABAAAAACw=", "image_uri", id="another format"),
    pytest.param("data:image/png;base64,????", "image_uri", id="no base64"),
    pytest.param("data:image/png;base64,AAAA", "image_format", id="no PNG"),
    pytest.param(uri(SMALL[:60]), "image_damaged", id="cut short"),
    pytest.param(uri(png_of(drawn(1, 300))), "image_aspect", id="a thread"),
]


@pytest.mark.parametrize(("url", "code"), BAD)
def test_a_bad_image_is_refused_by_name(server: Server, url: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, [{"type": "image_url", "image_url": {"url": url}}])

    assert (refused.value.code, refused.value.param) == (code, "messages")


def test_text_cannot_pass_itself_off_as_an_image(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="placeholders") as chat:
        ask(server, content("t3 <|media_pad|> t4"))
    with pytest.raises(openai.BadRequestError, match="placeholders") as completion:
        server.client().completions.create(model="tiny", prompt=[3, PAD, 4], max_tokens=2)

    assert (chat.value.param, completion.value.param) == ("messages", "prompt")


def test_a_request_has_so_many_images_and_no_more(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_images, "MAX_IMAGES", 2)

    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, content(SMALL, SMALL, SMALL))

    assert refused.value.code == "too_many_images"


def test_images_may_make_a_body_larger_than_text_may(server: Server) -> None:
    """A JPEG is read up to its end: what follows is ignored, and makes a picture of any size in bytes."""
    answer = ask(server, content(LARGE + bytes(3 << 20), "t3"))
    with pytest.raises(openai.APIStatusError) as refused:
        ask(server, content(LARGE + bytes(7 << 20), "t3"))

    assert answer.choices[0].message.content == ask(server, content(LARGE, "t3")).choices[0].message.content
    assert refused.value.status_code == 413


def test_recorded_requests_with_images_are_counted_and_left_out(server: Server, folder: Path) -> None:
    ask(server, QUESTIONS[0])
    ask(server, QUESTIONS[3])

    done = CliRunner().invoke(app, ["replay-requests", str(folder / "records"), "--against", str(folder / "core"),
                                    "--trust", str(folder / "keys" / "trust.json"), "--json"])

    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["with_images"] >= 1
    assert report["requests"] >= 1
    assert report["divergence"] is None
