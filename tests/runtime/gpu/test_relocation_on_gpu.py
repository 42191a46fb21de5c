"""A real core computes the same bytes wherever its memory lies, whatever it held, however large its K/V cache."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import runtime
from exporter.export import ExportRequest, export
from runtime.engine import Engine, Request
from runtime.gpu import loader
from runtime.keys import generate_key, load_private_key
from runtime.trust import TrustPolicy
from tests.tiny_pair import write_pair

pytestmark = pytest.mark.gpu
PROMPTS = ([3, 1, 4, 1, 5], [7, 3, 5] * 50)
PADDINGS = (0, 300 << 20, (1 << 30) + 4096)
"""Device memory that is taken first, so that the core's comes to lie elsewhere."""
TIMES = (1, 3)
"""The K/V cache has its default number of pages, or three times as many."""
FILLS = {"zeros": b"\0\0\0\0", "ones": b"\xff\xff\xff\xff", "nan": b"\xc0\x7f\xc0\x7f"}
"""What all of the core's memory holds before it is filled; the last is NaN as bf16 and as fp32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("relocation")
    write_pair(made, seed=3, draft_head_dim=32)
    generate_key(made / "keys")
    export(ExportRequest(target=made / "target", draft=made / "draft", out=made / "core", batches=(1, 2),
                         core_name="tiny", capability=90), load_private_key(made / "keys" / "key.pem"))
    return made


def test_addresses_cache_sizes_and_old_contents_change_no_byte(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, bases, sizes = {}, set(), set()
    for padding, times, (name, pattern) in product(PADDINGS, TIMES, FILLS.items()):
        with monkeypatch.context() as patch:
            _disturb(patch, padding, times, pattern)
            with runtime.load(folder / "core", trust=TrustPolicy.load(folder / "keys" / "trust.json"),
                              device="cuda") as core:
                bases.add(core._memory.device_base)
                sizes.add(core.symbols["kv_pages"])
                results[padding, times, name] = _computed(core)

    assert len(bases) >= len(PADDINGS)
    assert len(sizes) == len(TIMES)
    assert len(results) == len(PADDINGS) * len(TIMES) * len(FILLS)
    assert len(set(results.values())) == 1


def _disturb(patch: pytest.MonkeyPatch, padding: int, times: int, pattern: bytes) -> None:
    """Make the next core lie after `padding` bytes, in memory full of `pattern`, with `times` as many pages."""
    check, allocate = loader.check, loader.allocate

    def more_pages(*args: Any) -> Any:
        checked = check(*args)
        pages = next(s.symbol_id for s in checked.verified.manifest.symbols if s.name == "kv_pages")
        return replace(checked, symbols={**checked.symbols, pages: checked.symbols[pages] * times})

    def elsewhere(device: Any, layout: Any, releases: Any) -> Any:
        if padding:
            taken = device.driver.allocate(padding)
            releases.add(lambda: device.driver.free(taken))
        memory = allocate(device, layout, releases)
        old = ctypes.create_string_buffer(pattern * (layout.device_bytes // len(pattern)), layout.device_bytes)
        stream = device.driver.create_stream()
        device.driver.copy_in(memory.device_base, ctypes.addressof(old), layout.device_bytes, stream)
        device.driver.synchronize(stream)
        device.driver.destroy_stream(stream)
        return memory

    patch.setattr(loader, "check", more_pages)
    patch.setattr(loader, "allocate", elsewhere)


def _computed(core: Any) -> tuple[Any, ...]:
    """Tokens with and without the draft, two sequences at a time, and the bytes of the last step's logits."""
    found = []
    for speculation in (True, False):
        engine = Engine(core)
        sequences = [engine.add(prompt, Request(max_tokens=24, speculation=speculation)) for prompt in PROMPTS]
        while not engine.idle:
            engine.step()
        vocab = core.manifest.contract.vocab_size
        found.append((tuple(tuple(s.tokens) for s in sequences), array("f", core.get("logits", 0, vocab)).tobytes()))
    return tuple(found)
