"""Places of buffers: aligned, apart, host inputs first and alike on both sides."""

from __future__ import annotations

import pytest
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.manifest_pb2 import IoBinding, RebuildManifest, ServingContract
from dflash_core.v1.weights_pb2 import FileRef, WeightBlob

from runtime.gpu.layout import Place, Space, lay_out

IN, DEV, MAP = Space.INPUT, Space.DEVICE, Space.MAPPED


def manifest() -> RebuildManifest:
    io = [("slots", 1, False), ("length", 2, True), ("sampled", 3, True), ("limit", 4, False), ("both", 5, False),
          ("both.out", 5, True)]
    return RebuildManifest(
        weight_blobs=[WeightBlob(blob_id=9, file=FileRef(size_bytes=1000))],
        buffers=[
            g.Buffer(buffer_id=0, buffer_class=g.WEIGHTS, alignment=256, blob_id=9),
            g.Buffer(buffer_id=1, buffer_class=g.IO, alignment=256, fixed_bytes=8),
            g.Buffer(buffer_id=2, buffer_class=g.STATE, alignment=256, fixed_bytes=8),
            g.Buffer(buffer_id=3, buffer_class=g.IO, alignment=256, fixed_bytes=8, host_mapped=True),
            g.Buffer(buffer_id=4, buffer_class=g.IO, alignment=256, fixed_bytes=260),
            g.Buffer(buffer_id=5, buffer_class=g.IO, alignment=256, fixed_bytes=4),
            g.Buffer(buffer_id=6, buffer_class=g.KV_ARENA, alignment=1024,
                     size_terms=[g.SizeTerm(symbol_id=7, bytes=100)]),
            g.Buffer(buffer_id=7, buffer_class=g.SCRATCH, alignment=256, fixed_bytes=4, device_target=0),
            g.Buffer(buffer_id=8, buffer_class=g.IO, alignment=256, fixed_bytes=4),
        ],
        contract=ServingContract(io=[IoBinding(name=n, buffer_id=b, output=out) for n, b, out in io]))


def test_every_buffer_has_its_place() -> None:
    layout = lay_out(manifest(), target_id=1, symbols={7: 3})

    assert layout.places == {
        1: Place(IN, 0, 8), 4: Place(IN, 256, 260),
        0: Place(DEV, 768, 1000), 2: Place(DEV, 1792, 8), 5: Place(DEV, 2048, 4), 6: Place(DEV, 3072, 300),
        8: Place(DEV, 3584, 4),
        3: Place(MAP, 768, 8),
    }
    assert (layout.input_bytes, layout.device_bytes, layout.host_bytes) == (768, 3840, 1024)


def test_buffer_of_another_target_takes_no_place() -> None:
    assert 7 in lay_out(manifest(), target_id=0, symbols={7: 3}).places


@pytest.mark.parametrize(("pages", "nbytes"), [(0, 0), (1, 100), (1000, 100_000)])
def test_arena_grows_with_its_symbol(pages: int, nbytes: int) -> None:
    assert lay_out(manifest(), target_id=1, symbols={7: pages}).places[6] == Place(DEV, 3072, nbytes)
