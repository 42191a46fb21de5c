"""The whole export on one screen: open, plan, lay out, record, convert, package, sign."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from dflash_core.errors import PlanError, UsageError
from dflash_core.formats import FORMATS, Format
from dflash_core.v1 import manifest_pb2

from exporter.canary import add_canary
from exporter.canary_run import read_reference
from exporter.capture.target import GpuTarget
from exporter.checkpoint import CONFIG_NAME, Checkpoint, hash_files, identity_nbytes, open_checkpoint, read_side_file
from exporter.config_fields import Fields
from exporter.convert.journal import conversion_digest, is_resumable
from exporter.convert.packed import group_packed
from exporter.convert.stream import ConvertedWeights, convert_weights, write_error_report
from exporter.draft_config import DraftConfig, read_draft_config
from exporter.draft_kind import DraftMethod, read_architecture
from exporter.draft_tensors import check_draft_tensors
from exporter.kernels.tuning import MAX_STEP_ROWS
from exporter.kimi_config import KimiConfig, is_kimi, read_kimi_config
from exporter.models import dense, dflash2, kimi_weights, moonvit
from exporter.models.context import StoredWeight
from exporter.models.target import AnyTarget, head_name, tap_source
from exporter.package import FIRST_GPU_MODULE, CoreIdentity, SourceModel, UnsignedCore, write_core
from exporter.plan import PlannedTensor, PrecisionPlan, plan_precision
from exporter.plan_families import planned_only, refuse_export, report_family
from exporter.plan_report import PlanReport, report
from exporter.plan_rules import PrecisionSettings, RecordedPrecision
from exporter.program.builder import Program, Tensor
from exporter.program.graphs import Draft, RecordedProgram, record_program
from exporter.program.serving import ServingShape
from exporter.program.vision import Vision
from exporter.progress import Progress, Silent
from exporter.recipe import Recipe, find_recipe, load_recipe
from exporter.staging import check_output, staged
from exporter.target_config import check_target_tensors, read_target_config
from exporter.weights import Raw, WeightLayout, WeightSpec, layout_weights
from runtime.keys import PrivateKey
from runtime.ops import DTYPE_BY_NAME, DType
from runtime.sign import sign_core
from runtime.vision.settings import PREPROCESSOR_CONFIG, ImageSettings, read_image_settings

PAGE_TOKENS = 64
CHUNK_TOKENS = 64
GPU_CHUNK_TOKENS, LARGE_GPU_CHUNK_TOKENS = 256, 2048
LARGE_HIDDEN_SIZE = 2048
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What to export, and how.

    Attributes:
        target, draft: checkpoint folders; no draft exports plain decoding.
        out: the core's folder; must not exist unless `force`.
        settings: precision of each part.
        recipe: name or path of the target's recipe; None: by the checkpoint's architecture.
        core_name, release: identity of the core; None: the name of `out`.
        batches: batch buckets, ascending.
        max_context: most tokens of a sequence; None: the target's own, at most DEFAULT_CONTEXT.
        act: type of activations and K/V cache.
        image_patches: patches of the largest image of each vision graph, ascending; none: a core for text alone.
        capability: adds a GPU target: 90 for sm_90; None: a core for CPUs alone.
        witness: also capture every graph on this machine's GPU, and compare it with the recording.
        canary: record the acceptance canary, by running the core on this CPU.
        canary_reference: an earlier canary that the core must reproduce before its own is recorded.
    """

    target: Path
    out: Path
    draft: Path | None = None
    settings: PrecisionSettings = field(default_factory=PrecisionSettings)
    recipe: str | None = None
    core_name: str | None = None
    release: int = 1
    batches: tuple[int, ...] = (1,)
    max_context: int | None = None
    act: DType = DType.BF16
    capability: int | None = None
    witness: bool = False
    image_patches: tuple[int, ...] = ()
    force: bool = False
    canary: bool = False
    canary_reference: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft that fits its target; `names` leads from canonical tensor names to the checkpoint's own."""

    checkpoint: Checkpoint
    config: DraftConfig
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OpenedModels:
    """Everything read from headers and configs; no weight was touched."""

    target: Checkpoint
    target_config: AnyTarget
    recipe: Recipe
    draft: OpenedDraft | None
    vision: Vision | None = None
    image_settings: ImageSettings = field(default_factory=ImageSettings)


@dataclass(frozen=True, slots=True)
class SignedCore:
    """A finished core; `digest` is the SHA-256 of its manifest, in hex."""

    path: Path
    signature: Path
    manifest: manifest_pb2.RebuildManifest
    digest: str


class Convert(Protocol):
    """How an export gets its converted weights."""

    def __call__(self, models: OpenedModels, identity: CoreIdentity, layout: WeightLayout, staging: Path,
                 watch: Progress) -> ConvertedWeights:
        """Write every weight of the layout into `staging`."""


def export(request: ExportRequest, key: PrivateKey, progress: Progress | None = None,
           convert: Convert | None = None) -> SignedCore:
    """Write a signed core.

    Args:
        key: the signer's private key.
        progress: watches the stages; None: nobody does.
        convert: None: convert every weight from the checkpoints.
    Raises:
        CheckpointError, RecipeError, PlanError, ConvertError: the inputs cannot be exported as asked.
        ResourceError, UsageError: the output cannot be written, or exists.
    """
    watch = progress or Silent()
    check_output(request.out, force=request.force)
    name = core_name(request)
    _check_witness(request)
    if request.canary_reference is not None:
        read_reference(request.canary_reference)
    models = open_models(request, watch)
    plan = plan_models(models, request.settings)
    shape = serving_shape(models, plan, request)
    layout = layout_weights(weight_specs(models, plan, shape))
    recorded = record(models, plan, layout, shape, request)
    conversion = conversion_digest(layout, checkpoints(models))
    with staged(request.out, force=request.force, resumable=lambda left: is_resumable(left, conversion)) as staging:
        gpu = _compile(recorded, request, watch)
        identity = _identity(models, plan, request, name, shape, watch)
        weights = (convert or _convert)(models, identity, layout, staging, watch)
        write_error_report(staging, weights)
        unsigned = write_core(staging, identity, weights, recorded, shape, gpu)
        if request.canary:
            unsigned = add_canary(unsigned, watch, request.canary_reference)
        signature = _sign(unsigned, key, watch)
        digest = hashlib.sha256((staging / "manifest.pb").read_bytes()).hexdigest()
    return SignedCore(request.out, request.out / "signatures" / signature.name, unsigned.manifest, digest)


def plan_report(request: ExportRequest, progress: Progress | None = None) -> PlanReport:
    """What `export` would do with this request; nothing is converted or written. Raises as `export` does."""
    core_name(request)
    target = open_checkpoint(request.target)
    family = planned_only(target, request.recipe)
    if family is not None:
        return report_family(target, family, request.settings, request.draft is not None)
    models = open_models(request, progress or Silent())
    plan = plan_models(models, request.settings)
    shape = serving_shape(models, plan, request)
    layout = layout_weights(weight_specs(models, plan, shape))
    return report(plan, layout, record(models, plan, layout, shape, request), shape)


def open_models(request: ExportRequest, watch: Progress) -> OpenedModels:
    """Open both checkpoints, read their configs, and claim every tensor."""
    target = open_checkpoint(request.target)
    family = planned_only(target, request.recipe)
    if family is not None:
        raise refuse_export(target, family)
    config, notices = _read_target(target)
    recipe = load_recipe(request.recipe) if request.recipe else _recipe_of(config)
    draft = None
    if request.draft is not None:
        checkpoint = open_checkpoint(request.draft)
        draft_config = read_draft_config(checkpoint, config)
        names = check_draft_tensors(checkpoint, draft_config, target)
        draft = OpenedDraft(checkpoint, draft_config, names)
        notices += draft_config.notices
    vision, image_settings = None, ImageSettings()
    if request.image_patches:
        vision = _read_vision(target, config, request.image_patches)
        data = read_side_file(target, PREPROCESSOR_CONFIG)
        image_settings = read_image_settings(data)
        if data is None:
            notices.append(f"the checkpoint has no {PREPROCESSOR_CONFIG}: images are made as Kimi K3 publishes it")
    elif "vision_config" in target.config:
        notices.append("vision tower and projector are left out: this core answers text alone")
    for notice in notices:
        watch.notice(notice)
    return OpenedModels(target, config, recipe, draft, vision, image_settings)


def _read_vision(target: Checkpoint, config: AnyTarget, buckets: tuple[int, ...]) -> Vision:
    """The image tower of a checkpoint that has one.

    Raises:
        PlanError: NO_VISION; CheckpointError as `read_vision_config`.
    """
    fields = Fields(target.config, CONFIG_NAME).section("vision_config")
    if not fields.values:
        raise PlanError("NO_VISION", "this checkpoint has no image tower", where=str(target.path),
                        expected="vision_config", hint="leave out --image-patches")
    return Vision(moonvit.read_vision_config(fields, config.hidden_size), buckets)


def _read_target(checkpoint: Checkpoint) -> tuple[AnyTarget, list[str]]:
    """The target's config, and notices. A Kimi model's tensors are claimed by its recipe when it is planned."""
    if is_kimi(checkpoint):
        kimi = read_kimi_config(checkpoint)
        return kimi, list(kimi.notices)
    config = read_target_config(checkpoint)
    return config, [*config.notices, *check_target_tensors(checkpoint, config)]


def _recipe_of(config: AnyTarget) -> Recipe:
    recipe = find_recipe(config.architecture)
    assert recipe is not None, config.architecture
    return recipe


def plan_models(models: OpenedModels, settings: PrecisionSettings) -> PrecisionPlan:
    draft = models.draft
    return plan_precision(models.target, models.recipe, draft.checkpoint if draft else None,
                          draft.config if draft else None, settings)


def serving_shape(models: OpenedModels, plan: PrecisionPlan, request: ExportRequest) -> ServingShape:
    """Sizes of the serving buffers.

    Raises:
        PlanError: CONTEXT; more than the target was made for. GPU_BATCH; a step of more rows than GPU kernels compute
            alike for every number of them.
    """
    config, draft = models.target_config, models.draft
    context = request.max_context or min(config.max_position_embeddings, DEFAULT_CONTEXT)
    if context > config.max_position_embeddings:
        raise PlanError("CONTEXT", "the target was not made for this context", where="--max-context",
                        expected=f"at most {config.max_position_embeddings}", got=context,
                        hint="leave --max-context out for what the target was made for")
    depth = plan.recorded.depth
    candidates = dflash2.candidates(draft.config) if draft is not None and depth else 0
    chunk = CHUNK_TOKENS if request.capability is None else gpu_chunk_tokens(config.hidden_size)
    shape = ServingShape(max_batch=max(request.batches), max_context=context, page_tokens=PAGE_TOKENS,
                         chunk_tokens=chunk, depth=depth, candidates=candidates, vocab=config.vocab_size)
    rows = shape.max_batch * shape.block_rows
    if request.capability is not None and rows > MAX_STEP_ROWS:
        raise PlanError("GPU_BATCH", "a step of this batch has more rows than one on a GPU may have", where="--batch",
                        expected=f"at most {MAX_STEP_ROWS} rows, {MAX_STEP_ROWS // shape.block_rows} sequences",
                        got=f"{rows} rows, {shape.max_batch} sequences of {shape.block_rows}",
                        hint="give smaller batches; the server batches what comes by itself")
    return shape


def gpu_chunk_tokens(hidden_size: int) -> int:
    """Tokens of a prefill chunk on a GPU: a large model needs more of them to use its matrix units, and a small one
    wastes less on a short prompt with fewer."""
    return LARGE_GPU_CHUNK_TOKENS if hidden_size >= LARGE_HIDDEN_SIZE else GPU_CHUNK_TOKENS


def weight_specs(models: OpenedModels, plan: PrecisionPlan, shape: ServingShape) -> list[WeightSpec]:
    """Every weight of the core, in storage order."""
    specs = _target_specs(models, plan, shape)
    if models.draft is not None and shape.depth:
        entries = models.draft.checkpoint.tensors
        specs += dflash2.weight_specs(models.draft.config, models.draft.names, _formats(plan.draft),
                                      {name: entry.shape for name, entry in entries.items()}, shape.max_context)
        if plan.proposal_head is not None and plan.proposal_head.format is not None:
            head = plan.proposal_head
            assert isinstance(head.format, Format)
            specs.append(WeightSpec(name="head.proposal", blob="head", owner="draft", checkpoint="target",
                                    sources=(head.source,), recipe="copy/1", format=head.format, shape=head.shape))
    if models.vision is not None:
        specs += moonvit.weight_specs(models.vision.config, _formats(plan.target), models.image_settings)
    return specs


def _target_specs(models: OpenedModels, plan: PrecisionPlan, shape: ServingShape) -> list[WeightSpec]:
    config = models.target_config
    if isinstance(config, KimiConfig):
        planned = {models.recipe.bare(tensor.name): tensor for tensor in plan.target}
        return kimi_weights.weight_specs(config, planned, group_packed(models.target.tensors)[1])
    shapes = {name: entry.shape for name, entry in models.target.tensors.items()}
    return dense.weight_specs(config, _formats(plan.target), shapes, shape.max_context)


def _formats(tensors: Iterable[PlannedTensor]) -> dict[str, Format]:
    """Stored format by the checkpoint's own tensor name, of tensors that the core does not keep in a published one."""
    return {t.source: t.format for t in tensors if isinstance(t.format, Format)}


def record(models: OpenedModels, plan: PrecisionPlan, layout: WeightLayout, shape: ServingShape,
           request: ExportRequest) -> RecordedProgram:
    """Record every graph; needs no weight's value."""
    program = Program()
    weights = stored_weights(program, layout)
    draft = None
    if models.draft is not None and shape.depth:
        head = "head.proposal" if plan.proposal_head is not None else head_name(models.target_config)
        draft = Draft(models.draft.config, head)
    return record_program(program, models.target_config, draft, weights, shape, sorted(set(request.batches)),
                          request.act, models.vision)


def stored_weights(program: Program, layout: WeightLayout) -> dict[str, StoredWeight]:
    """Add a buffer per weight file and find every weight in it."""
    stored = {}
    for blob in layout.blobs:
        buffer_id = program.weights(f"weights.{blob.key}", blob.blob_id, blob.size_bytes)
        for placed in blob.weights:
            parts = [Tensor(buffer_id, v.offset_bytes, DTYPE_BY_NAME[v.dtype], v.shape, v.name) for v in placed.views]
            stored[placed.spec.name] = StoredWeight(placed.spec.format, *parts)
    return stored


def _compile(recorded: RecordedProgram, request: ExportRequest, watch: Progress) -> GpuTarget | None:
    """Lower and compile for a GPU; needs none, unless a witness is asked for."""
    capability = request.capability
    if capability is None:
        return None
    from exporter.capture.record import record_gpu
    from exporter.capture.witness import Witness

    graphs = zip(recorded.graphs, recorded.calls, strict=True)
    with Witness.open(recorded.program) if request.witness else nullcontext() as witness:
        with watch.stage("compile", 0) as on_bytes:
            gpu = record_gpu(recorded.program, graphs, capability, first_module_id=FIRST_GPU_MODULE,
                             on_kernel=on_bytes, witness=witness.check if witness else None)
        if witness is not None:
            gpu = replace(gpu, captured_on=(witness.device_name, witness.driver_version))
    size = sum(len(cubin) for _, cubin in gpu.modules)
    graphs_are = f"captured on {gpu.captured_on[0]}" if gpu.captured_on else "recorded"
    watch.done("compile", f"{len(gpu.modules)} kernels for {gpu.name}   {_size(size)}   {len(gpu.graphs)} graphs "
                          f"{graphs_are}")
    return gpu


def _check_witness(request: ExportRequest) -> None:
    """Raises UsageError WITNESS_DEVICE when there is nothing for a witness to capture."""
    if request.witness and request.capability is None:
        raise UsageError("WITNESS_DEVICE", "a witness captures GPU graphs", where="--witness",
                         expected="--device cuda:sm_90", got="--device cpu",
                         hint="name the GPU's architecture, or leave out --witness")


def checkpoints(models: OpenedModels) -> dict[str, Checkpoint]:
    """Both checkpoints by the key that weight specs use."""
    draft = {} if models.draft is None else {"draft": models.draft.checkpoint}
    return {"target": models.target, **draft}


def _convert(models: OpenedModels, identity: CoreIdentity, layout: WeightLayout, staging: Path,
             watch: Progress) -> ConvertedWeights:
    """Convert every weight from the checkpoints."""
    opened = checkpoints(models)
    with watch.stage("convert", layout.size_bytes) as on_bytes:
        weights = convert_weights(layout, opened, staging, on_bytes)
    counts: dict[Format | Raw, int] = {}
    for blob in layout.blobs:
        for placed in blob.weights:
            counts[placed.spec.format] = counts.get(placed.spec.format, 0) + 1
    listed = ", ".join(f"{fmt.value} {counts[fmt]}" for fmt in (*FORMATS, *Raw) if fmt in counts)
    before = sum(e.nbytes for c in opened.values() for e in c.tensors.values())
    watch.done("convert", f"{sum(counts.values())} weights   {_size(before)} → {_size(layout.size_bytes)}   ({listed})")
    return weights


def core_name(request: ExportRequest) -> str:
    """The name that the core will carry, signed.

    Raises:
        UsageError: CORE_NAME; it would not show as it is.
    """
    name = request.core_name if request.core_name is not None else request.out.name.lower()
    if not name.strip() or not name.isprintable():
        raise UsageError("CORE_NAME", "a core cannot have this name", where="--name", got=ascii(name),
                         expected="letters that show on a screen", hint="name it with --name, as in my-model.dflash2")
    return name


def _identity(models: OpenedModels, plan: PrecisionPlan, request: ExportRequest, name: str, shape: ServingShape,
              watch: Progress) -> CoreIdentity:
    draft = models.draft if shape.depth else None
    total = identity_nbytes(models.target) + (identity_nbytes(draft.checkpoint) if draft else 0)
    with watch.stage("identify", total) as on_bytes:
        target = SourceModel(models.target, hash_files(models.target, on_bytes),
                             read_architecture(models.target.config))
        source = None if draft is None else SourceModel(
            draft.checkpoint, hash_files(draft.checkpoint, on_bytes), read_architecture(draft.checkpoint.config))
    speculation = _speculation(draft.config, shape, plan.recorded, tap_source(models.target_config)) if draft else None
    files = len(target.files) + (len(source.files) if source else 0)
    watch.done("identify", f"{files} checkpoint files   {_size(total)} hashed")
    return CoreIdentity(
        core_name=name, release=request.release, target=target, draft=source,
        speculation=speculation,
        online_quantization=plan.recorded.online_quantization, online_mxfp8_scope=plan.recorded.online_mxfp8_scope,
        tuning_identity=plan.tuning_identity, arguments=_arguments(request))


def _speculation(config: DraftConfig, shape: ServingShape, recorded: RecordedPrecision,
                 taps: str | None) -> manifest_pb2.RebuildSpeculation:
    """Recorded as asked for, never as what it means; absent fields keep their meaning."""
    message = manifest_pb2.RebuildSpeculation(
        method=config.method.value, draft_depth=shape.depth, block_size=config.block_size, acceptance_rule="rejection")
    if config.method is DraftMethod.DFLASH2:
        message.candidate_top_k = shape.candidates
        message.conv_taps = config.conv_kernel_size or 0
        message.conv_group_size = config.conv_group_size or 0
    if config.output_multiplier != 1:
        message.output_multiplier = config.output_multiplier
    if config.final_logit_softcapping is not None:
        message.final_logit_softcapping = config.final_logit_softcapping
    if taps is not None:
        message.tap_source = taps
    if config.input_embedding_scale != 1:
        message.input_embedding_scale = config.input_embedding_scale
    if recorded.draft_body_quantization is not None:
        message.draft_body_quantization = recorded.draft_body_quantization
    if recorded.draft_head_quantization is not None:
        message.draft_head_quantization = recorded.draft_head_quantization
    return message


def _arguments(request: ExportRequest) -> tuple[str, ...]:
    """The settings that shaped the core, in a fixed order and without paths."""
    settings = request.settings
    given = [("--online-mxfp8-scope", settings.online_mxfp8_scope), ("--draft-body-quantization", settings.draft_body),
             ("--draft-head-quantization", settings.draft_head), ("--depth", settings.depth),
             ("--max-context", request.max_context), ("--capability", request.capability),
             ("--compute-dtype", request.act.view_name)]
    images = (f"--image-patches={patches}" for patches in request.image_patches)
    return (*(f"{name}={value}" for name, value in given if value is not None),
            *(f"--batch={batch}" for batch in sorted(set(request.batches))), *images)


def _sign(unsigned: UnsignedCore, key: PrivateKey, watch: Progress) -> Path:
    total = sum(f.ref.size_bytes for f in unsigned.manifest.files)
    with watch.stage("sign", total) as on_bytes:
        signature = sign_core(unsigned.path, key, on_bytes=on_bytes)
    files = len(unsigned.manifest.files) + 1
    watch.done("sign", f"{files} files   {_size(total)} hashed   (key {signature.stem[:12]}…)")
    return signature


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
