"""The vision graphs of a core, the buffers through which the host drives them, and where a prompt takes their rows.

| role   | bucket  | does                                                                                          |
|--------|---------|-----------------------------------------------------------------------------------------------|
| vision | patches | tower and projector for one image; its rows go to `image_embeddings`, from `image_first` on   |

Rows stay on the device: a prefill chunk names them by place (`chunk_images`), so that several images and several
sequences can wait in the same buffer, and a prompt without images leaves `chunk_images` at zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from dflash_core.errors import PlanError
from dflash_core.v1 import graph_pb2, manifest_pb2

from exporter.checkpoint import CONFIG_NAME, Checkpoint
from exporter.models import moonvit
from exporter.models.context import Forward, ImageRows, ImageSources, StoredWeight
from exporter.models.moonvit import VisionConfig
from exporter.program.builder import GraphRecorder, OpCall, Program, Tensor
from runtime.ops import DType
from runtime.vision.settings import PREPROCESSOR_CONFIG

ARCHITECTURE = "MoonViT3dPretrainedModel"  # what the published code calls the tower
LOAD_PRIORITY = 4
STEP_PATCHES = 4  # a group of 2 x 2 becomes one row
HOST_INPUTS = ("image_pixels", "image_grid", "image_first", "chunk_images")


@dataclass(frozen=True, slots=True)
class Vision:
    """A core's image tower: its config, and the patches of each of its graphs, ascending."""

    config: VisionConfig
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VisionBuffers:
    """One tensor per contract binding; the field name is the binding's name."""

    image_pixels: Tensor      # u8 [max_patches, 3 * patch_size^2], host in: levels of each patch, colour by colour
    image_grid: Tensor        # i32 [2], host in: rows and columns of patches
    image_first: Tensor       # i32 [1], host in: where the image's rows go
    image_embeddings: Tensor  # act [max_patches / 4, hidden], state: rows of images, until a prompt has taken them
    chunk_images: Tensor      # i32 [chunk_tokens], host in: 0, or 1 + the row of image_embeddings in a token's place

    def sources(self) -> ImageSources:
        """What a prefill chunk takes from images."""
        return ImageSources(self.chunk_images, self.image_embeddings)


@dataclass(frozen=True, slots=True)
class RecordedVision:
    """The vision graphs, the op calls of each, and what they were recorded for."""

    vision: Vision
    graphs: tuple[graph_pb2.Graph, ...]
    calls: tuple[tuple[OpCall, ...], ...]
    buffers: VisionBuffers


def vision_buffers(program: Program, vision: Vision, chunk_tokens: int, act: DType) -> VisionBuffers:
    """Add the buffers to the program; the largest bucket decides how large an image may be.

    Args:
        chunk_tokens: rows of a prefill chunk.
    Raises:
        PlanError: VISION_BUCKETS; a bucket is not made of whole groups of 2 x 2, or they do not ascend.
    """
    config, buckets = vision.config, vision.buckets
    if not buckets or list(buckets) != sorted({b for b in buckets if b > 0 and b % STEP_PATCHES == 0}):
        raise PlanError("VISION_BUCKETS", "these are no buckets of patches", where="vision buckets",
                        expected=f"ascending multiples of {STEP_PATCHES}", got=list(buckets),
                        hint="name for each bucket the patches of the largest image that it serves, as in 1024")
    most = buckets[-1]
    return VisionBuffers(
        image_pixels=program.io("image_pixels", DType.U8, (most, config.patch_values)),
        image_grid=program.io("image_grid", DType.I32, (2,)),
        image_first=program.io("image_first", DType.I32, (1,)),
        image_embeddings=program.state("image_embeddings", act, (most // STEP_PATCHES, config.text_hidden_size)),
        chunk_images=program.io("chunk_images", DType.I32, (chunk_tokens,)))


def record_vision(program: Program, vision: Vision, weights: Mapping[str, StoredWeight], buffers: VisionBuffers,
                  act: DType) -> RecordedVision:
    """Record a vision graph per bucket.

    Args:
        program: holds the weight buffers, and `buffers`.
        weights: logical name to stored weight.
        act: activation type, BF16 or F32.
    """
    recorders = [_record(program, vision.config, weights, buffers, patches, act) for patches in vision.buckets]
    graphs = tuple(r.finish([buffers.image_pixels, buffers.image_grid, buffers.image_first], [buffers.image_embeddings])
                   for r in recorders)
    return RecordedVision(vision, graphs, tuple(tuple(r.calls) for r in recorders), buffers)


def _record(program: Program, config: VisionConfig, weights: Mapping[str, StoredWeight], buffers: VisionBuffers,
            patches: int, act: DType) -> GraphRecorder:
    graph = GraphRecorder(program, f"vision.p{patches}", role="vision", batch=1, query_tokens=patches,
                          load_priority=LOAD_PRIORITY)
    image = ImageRows(patches, buffers.image_grid)
    rows = moonvit.record_encoder(Forward(graph, weights, act, image), config, image,
                                  buffers.image_pixels.rows(0, patches))
    capacity, cols = buffers.image_embeddings.shape
    graph.call("dflash.store_image/1",
               {"x": rows, "grid": image.grid, "first": buffers.image_first, "embeddings": buffers.image_embeddings},
               label="vision.rows", rows=patches // STEP_PATCHES, cols=cols, capacity=capacity, act=act)
    return graph


def vision_bindings(buffers: VisionBuffers) -> list[manifest_pb2.IoBinding]:
    """The contract's bindings; `output` marks what the host reads."""
    named = [(field.name, getattr(buffers, field.name)) for field in fields(buffers)]
    return [manifest_pb2.IoBinding(name=name, buffer_id=tensor.buffer_id, offset=tensor.offset,
                                   dtype=tensor.dtype.view_name, shape=tensor.shape, output=name not in HOST_INPUTS)
            for name, tensor in named]


def vision_identity(target: manifest_pb2.ModelIdentity, checkpoint: Checkpoint,
                    vision: Vision) -> manifest_pb2.VisionIdentity:
    """The encoder's place in the target's checkpoint, and how many rows the largest image has.

    Args:
        target: identity of the checkpoint, every file hashed; the encoder's are those that hold a tensor of it, and the
            two configs that say how images are made into its rows.
    """
    held = {checkpoint.tensors[name].shard for name in moonvit.vision_tensor_shapes(vision.config)}
    wanted = held | {CONFIG_NAME, PREPROCESSOR_CONFIG}
    encoder = manifest_pb2.ModelIdentity(
        repository=target.repository, revision=target.revision, architecture=ARCHITECTURE,
        files=[file for file in target.files if file.path in wanted])
    return manifest_pb2.VisionIdentity(encoder=encoder, max_image_tokens=vision.buckets[-1] // STEP_PATCHES)
