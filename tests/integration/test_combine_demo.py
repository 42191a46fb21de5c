"""Two cores of the demo pair with different buckets become one that serves both, and store its weights once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from exporter.combine import CombineRequest, combine
from exporter.export import ExportRequest, export
from exporter.reuse import export_reusing
from runtime import Engine, LoadedCore, Request, load
from tests.integration.conftest import DRAFT
from tests.integration.cores import DEMO_PRECISION, Signer
from tests.integration.reference import read_reference

PROMPTS = tuple(row.prompt for row in read_reference()[:4])
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(demo_target: Path, signer: Signer) -> Iterator[Path]:
    """`one` and `four`, of batch buckets 1 and 4, and `both`; the second takes its weights from the first."""
    with TemporaryDirectory() as made:
        def request(name: str, batch: int) -> ExportRequest:
            return ExportRequest(target=demo_target, draft=DRAFT, out=Path(made) / name, settings=DEMO_PRECISION,
                                 batches=(batch,), max_context=256)
        export(request("one", 1), signer.key)
        _, report = export_reusing(request("four", 4), Path(made) / "one", signer.trust, signer.key)
        assert report.misses == ()
        cores = Path(made) / "one", Path(made) / "four"
        combine(CombineRequest(cores, Path(made) / "both"), signer.trust, signer.key)
        yield Path(made)


def together(core: LoadedCore, prompts: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """What the prompts give when they run at the same time."""
    engine = Engine(core)
    running = [engine.add(prompt, Request(max_tokens=MAX_TOKENS)) for prompt in prompts]
    while not engine.idle:
        engine.step()
    return [tuple(sequence.tokens) for sequence in running]


def test_the_combined_core_serves_one_sequence_and_four(folder: Path, signer: Signer) -> None:
    with load(folder / "both", trust=signer.trust) as both:
        four, alone = together(both, PROMPTS), together(both, PROMPTS[:1])
        names = list(both.manifest.graph_files[0].graph_names)
    with load(folder / "four", trust=signer.trust) as core:
        assert four == together(core, PROMPTS)
    with load(folder / "one", trust=signer.trust) as core:
        assert alone == together(core, PROMPTS[:1]) == four[:1]
    assert names[1:] == ["draft.b1", "verify.b1", "decode.b1", "draft.b4", "verify.b4", "decode.b4"]


def test_the_combined_core_stores_the_weights_once(folder: Path) -> None:
    def nbytes(name: str) -> int:
        return sum(path.stat().st_size for path in (folder / name / "weights").iterdir())

    assert nbytes("both") == nbytes("one") == nbytes("four")
