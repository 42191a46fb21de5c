"""Combining cores of a Kimi pair: recurrent states get a row for every slot, and the text is that of one export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.combine import CombineRequest, combine
from exporter.export import ExportRequest, export
from exporter.plan import PrecisionSettings
from runtime import Engine, LoadedCore, Request, load
from tests.integration.cores import Signer
from tests.integration.watch import random_tokens
from tests.oracles.kimi_pair import K3, KimiPair, make_pair
from tests.oracles.zlab_pair import PairSpec

HEADLINE = PrecisionSettings(online_mxfp8_scope="kda-input", draft_body="mxfp8", draft_head="nvfp4")
PROMPTS = tuple(random_tokens(n, seed=n) for n in (3, 66, 1, 20))


class Cores:
    """A tiny K3 pair, its draft random, and cores in the headline precision by largest batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signer = Signer.create(folder / "keys")
        self.pair: KimiPair = make_pair(folder, K3, PairSpec(block_size=4, fit_steps=0), lambda target, prompt: [])

    def core(self, *batches: int) -> Path:
        out = self.folder / f"core-{'-'.join(map(str, batches))}"
        if not out.exists():
            export(ExportRequest(target=self.pair.target_path, draft=self.pair.draft_path, out=out, batches=batches,
                                 settings=HEADLINE, max_context=128), self.signer.key)
        return out

    def load(self, core: Path) -> LoadedCore:
        return load(core, trust=self.signer.trust)


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    yield Cores(tmp_path_factory.mktemp("kimi"))


def outputs(core: LoadedCore, speculation: bool) -> list[tuple[int, ...]]:
    engine = Engine(core)
    running = [engine.add(p, Request(max_tokens=16, speculation=speculation)) for p in PROMPTS]
    while not engine.idle:
        engine.step()
    return [tuple(sequence.tokens) for sequence in running]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["small-first", "large-first"])
def test_combined_core_serves_the_larger_batch_as_one_export_does(cores: Cores, tmp_path: Path,
                                                                  order: tuple[int, int]) -> None:
    parts = [cores.core(1), cores.core(1, 4)]

    combine(CombineRequest(tuple(parts[i] for i in order), tmp_path / "out"), cores.signer.trust, cores.signer.key)

    with cores.load(tmp_path / "out") as combined, cores.load(parts[1]) as whole:
        contract = combined.manifest.contract
        sizes = {b.name: b.fixed_bytes for b in combined.manifest.buffers if b.name.startswith("slot_")}
        assert contract.max_batch == 4
        assert combined.manifest.speculation.tap_source == whole.manifest.speculation.tap_source == "residual-mixture"
        assert sum(sizes.values()) == 4 * contract.state_bytes_per_slot > 0
        expected = outputs(whole, speculation=False)
        assert outputs(combined, speculation=True) == outputs(combined, speculation=False) == expected
