from dflash_core.v1 import weights_pb2 as _weights_pb2
from dflash_core.v1 import graph_pb2 as _graph_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RebuildManifest(_message.Message):
    __slots__ = ("format_version", "core_name", "target", "speculation", "parallelism", "online_quantization", "online_mxfp8_scope", "files", "weight_blobs", "tensor_views", "buffers", "modules", "kernels", "graph_files", "symbols", "device_targets", "contract", "provenance", "components", "vision", "tuning_identity", "required_features", "release")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CORE_NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    ONLINE_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ONLINE_MXFP8_SCOPE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BLOBS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_VIEWS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FILES_FIELD_NUMBER: _ClassVar[int]
    SYMBOLS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TARGETS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    TUNING_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    core_name: str
    target: ModelIdentity
    speculation: RebuildSpeculation
    parallelism: Parallelism
    online_quantization: str
    online_mxfp8_scope: str
    files: _containers.RepeatedCompositeFieldContainer[_weights_pb2.FileEntry]
    weight_blobs: _containers.RepeatedCompositeFieldContainer[_weights_pb2.WeightBlob]
    tensor_views: _containers.RepeatedCompositeFieldContainer[_weights_pb2.TensorView]
    buffers: _containers.RepeatedCompositeFieldContainer[_graph_pb2.Buffer]
    modules: _containers.RepeatedCompositeFieldContainer[_graph_pb2.KernelModule]
    kernels: _containers.RepeatedCompositeFieldContainer[_graph_pb2.Kernel]
    graph_files: _containers.RepeatedCompositeFieldContainer[_graph_pb2.GraphFile]
    symbols: _containers.RepeatedCompositeFieldContainer[_graph_pb2.Symbol]
    device_targets: _containers.RepeatedCompositeFieldContainer[_graph_pb2.DeviceTarget]
    contract: ServingContract
    provenance: Provenance
    components: _containers.RepeatedCompositeFieldContainer[CoreComponent]
    vision: VisionIdentity
    tuning_identity: bytes
    required_features: _containers.RepeatedScalarFieldContainer[str]
    release: int
    def __init__(self, format_version: _Optional[int] = ..., core_name: _Optional[str] = ..., target: _Optional[_Union[ModelIdentity, _Mapping]] = ..., speculation: _Optional[_Union[RebuildSpeculation, _Mapping]] = ..., parallelism: _Optional[_Union[Parallelism, _Mapping]] = ..., online_quantization: _Optional[str] = ..., online_mxfp8_scope: _Optional[str] = ..., files: _Optional[_Iterable[_Union[_weights_pb2.FileEntry, _Mapping]]] = ..., weight_blobs: _Optional[_Iterable[_Union[_weights_pb2.WeightBlob, _Mapping]]] = ..., tensor_views: _Optional[_Iterable[_Union[_weights_pb2.TensorView, _Mapping]]] = ..., buffers: _Optional[_Iterable[_Union[_graph_pb2.Buffer, _Mapping]]] = ..., modules: _Optional[_Iterable[_Union[_graph_pb2.KernelModule, _Mapping]]] = ..., kernels: _Optional[_Iterable[_Union[_graph_pb2.Kernel, _Mapping]]] = ..., graph_files: _Optional[_Iterable[_Union[_graph_pb2.GraphFile, _Mapping]]] = ..., symbols: _Optional[_Iterable[_Union[_graph_pb2.Symbol, _Mapping]]] = ..., device_targets: _Optional[_Iterable[_Union[_graph_pb2.DeviceTarget, _Mapping]]] = ..., contract: _Optional[_Union[ServingContract, _Mapping]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., components: _Optional[_Iterable[_Union[CoreComponent, _Mapping]]] = ..., vision: _Optional[_Union[VisionIdentity, _Mapping]] = ..., tuning_identity: _Optional[bytes] = ..., required_features: _Optional[_Iterable[str]] = ..., release: _Optional[int] = ...) -> None: ...

class RebuildSpeculation(_message.Message):
    __slots__ = ("method", "draft_depth", "block_size", "draft", "candidate_top_k", "draft_head_quantization", "verify_head_precision", "acceptance_rule", "conv_taps", "conv_group_size", "output_multiplier", "final_logit_softcapping", "input_embedding_scale", "draft_body_quantization", "tap_source")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DEPTH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_TOP_K_FIELD_NUMBER: _ClassVar[int]
    DRAFT_HEAD_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    VERIFY_HEAD_PRECISION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULE_FIELD_NUMBER: _ClassVar[int]
    CONV_TAPS_FIELD_NUMBER: _ClassVar[int]
    CONV_GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    FINAL_LOGIT_SOFTCAPPING_FIELD_NUMBER: _ClassVar[int]
    INPUT_EMBEDDING_SCALE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BODY_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    TAP_SOURCE_FIELD_NUMBER: _ClassVar[int]
    method: str
    draft_depth: int
    block_size: int
    draft: ModelIdentity
    candidate_top_k: int
    draft_head_quantization: str
    verify_head_precision: str
    acceptance_rule: str
    conv_taps: int
    conv_group_size: int
    output_multiplier: float
    final_logit_softcapping: float
    input_embedding_scale: float
    draft_body_quantization: str
    tap_source: str
    def __init__(self, method: _Optional[str] = ..., draft_depth: _Optional[int] = ..., block_size: _Optional[int] = ..., draft: _Optional[_Union[ModelIdentity, _Mapping]] = ..., candidate_top_k: _Optional[int] = ..., draft_head_quantization: _Optional[str] = ..., verify_head_precision: _Optional[str] = ..., acceptance_rule: _Optional[str] = ..., conv_taps: _Optional[int] = ..., conv_group_size: _Optional[int] = ..., output_multiplier: _Optional[float] = ..., final_logit_softcapping: _Optional[float] = ..., input_embedding_scale: _Optional[float] = ..., draft_body_quantization: _Optional[str] = ..., tap_source: _Optional[str] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("repository", "revision", "architecture", "files", "config", "tokenizer", "checkpoint_dtype", "license")
    REPOSITORY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LICENSE_FIELD_NUMBER: _ClassVar[int]
    repository: str
    revision: str
    architecture: str
    files: _containers.RepeatedCompositeFieldContainer[SourceFile]
    config: _weights_pb2.FileRef
    tokenizer: _weights_pb2.FileRef
    checkpoint_dtype: str
    license: str
    def __init__(self, repository: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., files: _Optional[_Iterable[_Union[SourceFile, _Mapping]]] = ..., config: _Optional[_Union[_weights_pb2.FileRef, _Mapping]] = ..., tokenizer: _Optional[_Union[_weights_pb2.FileRef, _Mapping]] = ..., checkpoint_dtype: _Optional[str] = ..., license: _Optional[str] = ...) -> None: ...

class SourceFile(_message.Message):
    __slots__ = ("path", "size_bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    sha256: bytes
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class VisionIdentity(_message.Message):
    __slots__ = ("encoder", "max_image_tokens")
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    encoder: ModelIdentity
    max_image_tokens: int
    def __init__(self, encoder: _Optional[_Union[ModelIdentity, _Mapping]] = ..., max_image_tokens: _Optional[int] = ...) -> None: ...

class Parallelism(_message.Message):
    __slots__ = ("world_size", "tensor_parallel", "decode_context_parallel", "kv_interleave", "collective_plan")
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    KV_INTERLEAVE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_PLAN_FIELD_NUMBER: _ClassVar[int]
    world_size: int
    tensor_parallel: int
    decode_context_parallel: int
    kv_interleave: int
    collective_plan: str
    def __init__(self, world_size: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., decode_context_parallel: _Optional[int] = ..., kv_interleave: _Optional[int] = ..., collective_plan: _Optional[str] = ...) -> None: ...

class ServingContract(_message.Message):
    __slots__ = ("max_batch", "max_query_tokens", "max_context", "vocab_size", "page_tokens", "kv_bytes_per_page", "state_bytes_per_slot", "sampling_modes", "io")
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MODES_FIELD_NUMBER: _ClassVar[int]
    IO_FIELD_NUMBER: _ClassVar[int]
    max_batch: int
    max_query_tokens: int
    max_context: int
    vocab_size: int
    page_tokens: int
    kv_bytes_per_page: int
    state_bytes_per_slot: int
    sampling_modes: _containers.RepeatedScalarFieldContainer[str]
    io: _containers.RepeatedCompositeFieldContainer[IoBinding]
    def __init__(self, max_batch: _Optional[int] = ..., max_query_tokens: _Optional[int] = ..., max_context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., page_tokens: _Optional[int] = ..., kv_bytes_per_page: _Optional[int] = ..., state_bytes_per_slot: _Optional[int] = ..., sampling_modes: _Optional[_Iterable[str]] = ..., io: _Optional[_Iterable[_Union[IoBinding, _Mapping]]] = ...) -> None: ...

class IoBinding(_message.Message):
    __slots__ = ("name", "buffer_id", "offset", "dtype", "shape", "output")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    buffer_id: int
    offset: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    output: bool
    def __init__(self, name: _Optional[str] = ..., buffer_id: _Optional[int] = ..., offset: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., output: bool = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("exporter_version", "source_commit", "source_dirty", "pins", "arguments", "export_device", "export_driver", "created_unix", "parents")
    EXPORTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COMMIT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIRTY_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    EXPORT_DEVICE_FIELD_NUMBER: _ClassVar[int]
    EXPORT_DRIVER_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    exporter_version: str
    source_commit: str
    source_dirty: bool
    pins: _containers.RepeatedCompositeFieldContainer[SourcePin]
    arguments: _containers.RepeatedScalarFieldContainer[str]
    export_device: str
    export_driver: int
    created_unix: int
    parents: _containers.RepeatedCompositeFieldContainer[_weights_pb2.FileRef]
    def __init__(self, exporter_version: _Optional[str] = ..., source_commit: _Optional[str] = ..., source_dirty: bool = ..., pins: _Optional[_Iterable[_Union[SourcePin, _Mapping]]] = ..., arguments: _Optional[_Iterable[str]] = ..., export_device: _Optional[str] = ..., export_driver: _Optional[int] = ..., created_unix: _Optional[int] = ..., parents: _Optional[_Iterable[_Union[_weights_pb2.FileRef, _Mapping]]] = ...) -> None: ...

class SourcePin(_message.Message):
    __slots__ = ("name", "url", "commit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    url: str
    commit: str
    def __init__(self, name: _Optional[str] = ..., url: _Optional[str] = ..., commit: _Optional[str] = ...) -> None: ...

class CoreComponent(_message.Message):
    __slots__ = ("component_id", "core_name", "manifest", "signatures", "recorded_speculation", "recorded_online_quantization", "recorded_online_mxfp8_scope", "kernel_ids", "module_ids", "buffer_ids", "blob_ids", "symbol_ids", "graph_names")
    COMPONENT_ID_FIELD_NUMBER: _ClassVar[int]
    CORE_NAME_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    RECORDED_SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RECORDED_ONLINE_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    RECORDED_ONLINE_MXFP8_SCOPE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_IDS_FIELD_NUMBER: _ClassVar[int]
    MODULE_IDS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOB_IDS_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_NAMES_FIELD_NUMBER: _ClassVar[int]
    component_id: int
    core_name: str
    manifest: _weights_pb2.FileRef
    signatures: _containers.RepeatedCompositeFieldContainer[_weights_pb2.FileRef]
    recorded_speculation: RebuildSpeculation
    recorded_online_quantization: str
    recorded_online_mxfp8_scope: str
    kernel_ids: _containers.RepeatedCompositeFieldContainer[IdMap]
    module_ids: _containers.RepeatedCompositeFieldContainer[IdMap]
    buffer_ids: _containers.RepeatedCompositeFieldContainer[IdMap]
    blob_ids: _containers.RepeatedCompositeFieldContainer[IdMap]
    symbol_ids: _containers.RepeatedCompositeFieldContainer[IdMap]
    graph_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, component_id: _Optional[int] = ..., core_name: _Optional[str] = ..., manifest: _Optional[_Union[_weights_pb2.FileRef, _Mapping]] = ..., signatures: _Optional[_Iterable[_Union[_weights_pb2.FileRef, _Mapping]]] = ..., recorded_speculation: _Optional[_Union[RebuildSpeculation, _Mapping]] = ..., recorded_online_quantization: _Optional[str] = ..., recorded_online_mxfp8_scope: _Optional[str] = ..., kernel_ids: _Optional[_Iterable[_Union[IdMap, _Mapping]]] = ..., module_ids: _Optional[_Iterable[_Union[IdMap, _Mapping]]] = ..., buffer_ids: _Optional[_Iterable[_Union[IdMap, _Mapping]]] = ..., blob_ids: _Optional[_Iterable[_Union[IdMap, _Mapping]]] = ..., symbol_ids: _Optional[_Iterable[_Union[IdMap, _Mapping]]] = ..., graph_names: _Optional[_Iterable[str]] = ...) -> None: ...

class IdMap(_message.Message):
    __slots__ = ("component", "combined")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    COMBINED_FIELD_NUMBER: _ClassVar[int]
    component: int
    combined: int
    def __init__(self, component: _Optional[int] = ..., combined: _Optional[int] = ...) -> None: ...
