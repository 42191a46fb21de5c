"""Tiny Kimi cores on a real GPU: what their CPU graphs compute, lossless speculation, states, snapshots, images.

The cores are exported without a GPU. DFLASH_TEST_CORES names a folder that keeps them from one run to the next, for a
GPU that is borrowed by the minute; it is filled by `python -m tests.runtime.gpu.test_kimi_on_gpu DIR`.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import runtime
from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime.cli import app
from runtime.engine import Engine, Request, StepKind
from runtime.keys import generate_key, load_private_key
from runtime.trust import TrustPolicy
from runtime.vision.rows import PromptImages
from tests.integration.watch import random_tokens
from tests.oracles.drawn_images import drawn, jpeg_of, png_of
from tests.oracles.kimi_pair import K3, KIMI_LINEAR, TAPS, make_pair, write_target
from tests.oracles.mla_draft_numpy import write_draft
from tests.oracles.zlab_pair import MASK_TOKEN, PairSpec

pytestmark = pytest.mark.gpu
DEPTH, CONTEXT = 7, 320
HEADLINE = PrecisionSettings(online_mxfp8_scope="kda-input", draft_body="mxfp8", draft_head="nvfp4")
PLAIN = PrecisionSettings()
PAD = K3["media_placeholder_token_id"]
SMALL, LARGE = png_of(drawn(56, 30)), jpeg_of(drawn(160, 90))
NEAR = 0.15  # of a row's largest value


def make_cores(folder: Path) -> None:
    """Three cores: Kimi-Linear with NVFP4 experts; K3 that sees, in the headline precision; K3 with MXFP4 experts and a
    draft of latent attention."""
    torch.set_num_threads(2)
    generate_key(folder / "keys")
    key, bf16 = load_private_key(folder / "keys" / "key.pem"), torch.bfloat16
    trust = TrustPolicy.load(folder / "keys" / "trust.json")

    def write(target: Path, prompt: list[int]) -> list[int]:
        export(ExportRequest(target=target, out=folder / "alone", max_context=CONTEXT, force=True), key)
        with runtime.load(folder / "alone", trust=trust) as core:
            return list(Engine(core).generate(prompt, Request(max_tokens=64)).tokens)

    spec = PairSpec(block_size=1 + DEPTH, fit_steps=200)
    for name, config, experts, settings, patches in (("linear", KIMI_LINEAR, "nvfp4-modelopt", PLAIN, ()),
                                                     ("k3", K3, "plain", HEADLINE, (16, 128))):
        pair = make_pair(folder / f"{name}-pair", config, spec, write, dtype=bf16, experts=experts)
        export(ExportRequest(target=pair.target_path, draft=pair.draft_path, out=folder / name, settings=settings,
                             batches=(1, 4), max_context=CONTEXT, capability=90, image_patches=patches), key)
    write_target(folder / "mla-pair" / "target", K3, dtype=bf16, experts="mxfp4")
    write_draft(folder / "mla-pair" / "draft", TAPS, window=12, block_size=1 + DEPTH, dtype=bf16)
    export(ExportRequest(target=folder / "mla-pair" / "target", draft=folder / "mla-pair" / "draft",
                         out=folder / "mla", max_context=CONTEXT, capability=90), key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("DFLASH_TEST_CORES")
    made = Path(kept) if kept else tmp_path_factory.mktemp("kimi")
    if not (made / "mla").exists():
        make_cores(made)
    return made


@dataclass(frozen=True, slots=True)
class Loaded:
    """One core on the GPU and on the CPU."""

    gpu: Any
    cpu: Any


@pytest.fixture(scope="module", params=["linear", "k3", "mla"])
def loaded(request: pytest.FixtureRequest, folder: Path) -> Iterator[Loaded]:
    trust = TrustPolicy.load(folder / "keys" / "trust.json")
    with (runtime.load(folder / request.param, trust=trust, device="cuda") as gpu,
          runtime.load(folder / request.param, trust=trust) as cpu):
        yield Loaded(gpu, cpu)


class Lane:
    """One sequence in a slot, alone in its launches."""

    def __init__(self, core: Any, slot: int = 0) -> None:
        self.core, self.slot = core, slot
        pages = core.shape("page_table")[1]
        core.put("page_table", slot * pages, [slot * pages + page for page in reversed(range(pages))])
        core.put("limit", slot, [CONTEXT])
        core.put("length", slot, [0])
        core.put("temperature", slot, [0.0])

    def launch(self, role: str) -> None:
        lanes = self.core.shape("slots")[0]
        self.core.put("slots", 0, [self.slot, *[-1] * (lanes - 1)])
        self.core.graph(role, 1).run()

    def prefill(self, tokens: Sequence[int]) -> bytes:
        size = self.core.shape("chunk_tokens")[0]
        for first in range(0, len(tokens), size):
            chunk = list(tokens[first:first + size])
            self.core.put("chunk_tokens", 0, [*chunk, *[0] * (size - len(chunk))])
            self.core.put("chunk_count", 0, [len(chunk)])
            self.launch("prefill")
        return logits_rows(self.core, 0, 1)[0]

    def decode(self, token: int) -> bytes:
        self.core.put("anchor", self.slot, [token])
        self.launch("decode")
        return logits_rows(self.core, 0, 1)[0]

    def verify(self, anchor: int, proposals: Sequence[int]) -> list[bytes]:
        self.core.put("anchor", self.slot, [anchor])
        self.core.put("proposals", 0, proposals)
        self.launch("verify")
        return logits_rows(self.core, 0, 1 + len(proposals))


def logits_rows(core: Any, first: int, count: int) -> list[bytes]:
    vocab = core.shape("logits")[1]
    values = core.get("logits", first * vocab, count * vocab)
    return [array("f", values[i * vocab:(i + 1) * vocab]).tobytes() for i in range(count)]


def row(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.float32)


def states(core: Any, slot: int) -> dict[str, bytes]:
    """The bytes of every recurrent buffer's row for a slot."""
    found, slots = {}, core.manifest.contract.max_batch
    for buffer in core.manifest.buffers:
        if buffer.name.startswith("slot_"):
            nbytes = buffer.fixed_bytes // slots
            found[buffer.name] = bytes(core.read_buffer(buffer.buffer_id, slot * nbytes, nbytes))
    return found


def watched(core: Any, prompt: Sequence[int], request: Request, images: PromptImages | None = None,
            before: Sequence[Sequence[int]] = ()) -> tuple[tuple[int, ...], list[bytes], Any]:
    """Tokens of a prompt among others, the logits row of each after the first, and its completion."""
    engine = Engine(core)
    for other in before:
        engine.add(other, Request(max_tokens=9))
    sequence = engine.add(images.prompt.tokens if images else prompt, request, images)
    rows: list[bytes] = []
    while not engine.idle:
        stepped = [output for output in engine.step() if output.record.kind is not StepKind.PREFILL]
        for lane, output in enumerate(stepped):
            if output.sequence is sequence:
                each = core.shape("emitted")[1] if output.record.kind is StepKind.VERIFY else 1
                rows += logits_rows(core, lane * each, len(output.record.tokens))
    completion = sequence.completion()
    return completion.tokens, rows, completion


@pytest.mark.parametrize("length", [1, 60, 130])
def test_text_and_logits_are_the_same_with_and_without_speculation(loaded: Loaded, length: int) -> None:
    prompt = random_tokens(length, seed=length)

    plain = watched(loaded.gpu, prompt, Request(max_tokens=40, speculation=False))
    fast = watched(loaded.gpu, prompt, Request(max_tokens=40))
    beside = watched(loaded.gpu, prompt, Request(max_tokens=40), before=[random_tokens(n, seed=n) for n in (5, 70)]
                     if loaded.gpu.shape("slots")[0] > 1 else ())

    assert fast[:2] == plain[:2] == beside[:2]
    assert np.isfinite([row(r) for r in fast[1]]).all()


def test_logits_are_near_those_of_the_cpu(loaded: Loaded) -> None:
    """In the median of 13 rows: a pair whose weights are as lively as these sends a token to other experts for the last
    bit of a score, in a row or two. Between bf16 and fp32 on a CPU the medians are 0.03 to 0.07."""
    prompt = random_tokens(100, seed=4)
    gpu, cpu = Lane(loaded.gpu), Lane(loaded.cpu)
    pairs = [(gpu.prefill(prompt), cpu.prefill(prompt))]
    for token in random_tokens(12, seed=5):
        pairs.append((gpu.decode(token), cpu.decode(token)))

    apart = [np.abs(row(mine) - row(theirs)).max() / np.abs(row(theirs)).max() for mine, theirs in pairs]
    assert np.median(apart) <= NEAR, apart


GRAPHS = ["prefill.c256", "draft.b1", "verify.b1", "decode.b1"]


@pytest.mark.parametrize("name", ["linear", "k3", "mla"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_node_computes_what_its_cpu_ops_say(folder: Path, name: str, graph: str) -> None:
    done = CliRunner().invoke(app, ["replay", str(folder / name), "--trust", str(folder / "keys" / "trust.json"),
                                    "--graph", graph, "--against", "cpu", "--json"])

    assert done.exit_code == 0, done.output
    assert all(node["within"] for node in json.loads(done.stdout)["nodes"])


@pytest.mark.parametrize("prompt_tokens", [1, 66], ids=lambda n: f"after-{n}")
def test_state_after_verifying_is_that_of_decoding_the_accepted_rows(loaded: Loaded, prompt_tokens: int) -> None:
    prompt, core = random_tokens(prompt_tokens, seed=prompt_tokens), loaded.gpu
    slow = Lane(core)
    text, rows, left = [int(row(slow.prefill(prompt)).argmax())], [], []
    for _ in range(DEPTH + 2):
        rows.append(slow.decode(text[-1]))
        left.append(states(core, 0))
        text.append(int(row(rows[-1]).argmax()))

    slot = core.shape("slots")[0] - 1
    for accepted in range(DEPTH + 1):
        wrong = [(token + 1) % MASK_TOKEN for token in text[1 + accepted:1 + DEPTH]]
        fast = Lane(core, slot)
        fast.prefill(prompt)
        verified = fast.verify(text[0], [*text[1:1 + accepted], *wrong])

        assert core.get("accepted", 0, 1) == [accepted]
        assert states(core, slot) == left[accepted], accepted
        assert verified[:accepted + 1] == rows[:accepted + 1]
        assert fast.decode(text[accepted + 1]) == rows[accepted + 1]


def test_prompts_that_begin_alike_start_from_a_snapshot_with_the_bits_of_a_cold_start(loaded: Loaded) -> None:
    system = random_tokens(128, seed=1)
    a, b, other = [*system, *random_tokens(20, seed=2)], [*system, *random_tokens(90, seed=3)], random_tokens(150, 9)
    cold = {tuple(p): watched(loaded.gpu, p, Request(max_tokens=12))[:2] for p in (a, b, other)}
    engine, depths = Engine(loaded.gpu), []
    for prompt in (a, b, a, other, b):
        sequence = engine.add(prompt, Request(max_tokens=12))
        rows: list[bytes] = []
        while not engine.idle:
            for output in engine.step():
                if output.record.kind is not StepKind.PREFILL:
                    rows += logits_rows(loaded.gpu, 0, len(output.record.tokens))
        depths.append(sequence.taken_over)
        assert (tuple(sequence.tokens), rows) == cold[tuple(prompt)]

    assert max(depths) >= 128, "nothing was taken over"


def test_fitted_draft_proposes_the_text_it_was_fitted_to(folder: Path) -> None:
    """From every place of the CPU's text, which the GPU's own soon leaves, as often as on the CPU, almost."""
    generator = torch.Generator().manual_seed(3)  # as `make_pair` draws the prompt that the draft was fitted for
    trust = TrustPolicy.load(folder / "keys" / "trust.json")
    prompt = torch.randint(0, MASK_TOKEN, (PairSpec().prompt_tokens,), generator=generator).tolist()
    hits = []
    with (runtime.load(folder / "linear", trust=trust) as cpu,
          runtime.load(folder / "linear", trust=trust, device="cuda") as gpu):
        text = [*prompt, *Engine(cpu).generate(prompt, Request(max_tokens=40, speculation=False)).tokens]
        for core in (cpu, gpu):
            found = 0
            for place in range(len(prompt), len(text) - DEPTH - 1, 3):
                lane = Lane(core)
                lane.prefill(text[:place])
                core.put("anchor", 0, [text[place]])
                lane.launch("draft")
                proposed = core.get("proposals", 0, DEPTH)
                found += sum(a == b for a, b in zip(proposed, text[place + 1:], strict=False))
            hits.append(found)

    assert hits[0] > DEPTH, "the draft was not fitted"
    assert hits[1] >= 0.8 * hits[0]


@pytest.mark.parametrize("files", [(SMALL,), (LARGE, SMALL)], ids=["one", "two"])
def test_an_image_question_has_one_answer(folder: Path, files: tuple[bytes, ...]) -> None:
    """Speculation changes nothing, and an image's rows are near those of the CPU."""
    trust = TrustPolicy.load(folder / "keys" / "trust.json")
    tokens = [*random_tokens(7, seed=1), *[PAD] * len(files), 5, 6]
    rows = []
    for device in ("cuda", "cpu"):
        with runtime.load(folder / "k3", trust=trust, device=device) as core:
            engine = Engine(core)
            images = PromptImages.of(engine.encoder, tokens, [engine.encoder.patches(file) for file in files])
            if device == "cuda":
                plain = watched(core, (), Request(max_tokens=16, speculation=False), images)
                fast = watched(core, (), Request(max_tokens=16), images)
                assert fast[:2] == plain[:2]
            engine.encoder.encode(images.images[0], 0)
            rows.append(np.array(engine.encoder.rows(0, images.images[0].tokens), np.float32))
    assert np.abs(rows[0] - rows[1]).max() <= 2.0**-5 * np.abs(rows[1]).max()


if __name__ == "__main__":
    make_cores(Path(sys.argv[1]))
