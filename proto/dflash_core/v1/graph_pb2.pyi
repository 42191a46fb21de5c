from dflash_core.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BufferClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUFFER_CLASS_UNSPECIFIED: _ClassVar[BufferClass]
    WEIGHTS: _ClassVar[BufferClass]
    KV_ARENA: _ClassVar[BufferClass]
    STATE: _ClassVar[BufferClass]
    SCRATCH: _ClassVar[BufferClass]
    IO: _ClassVar[BufferClass]
    POINTER_TABLE: _ClassVar[BufferClass]
    SYMMETRIC: _ClassVar[BufferClass]

class ModuleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODULE_KIND_UNSPECIFIED: _ClassVar[ModuleKind]
    CUBIN: _ClassVar[ModuleKind]
    PTX: _ClassVar[ModuleKind]
    CPU_REGISTRY: _ClassVar[ModuleKind]

class ParamType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARAM_TYPE_UNSPECIFIED: _ClassVar[ParamType]
    POINTER: _ClassVar[ParamType]
    SCALAR: _ClassVar[ParamType]
    TENSOR_MAP: _ClassVar[ParamType]
    HANDLE: _ClassVar[ParamType]
    STRUCT: _ClassVar[ParamType]

class NodeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_KIND_UNSPECIFIED: _ClassVar[NodeKind]
    KERNEL: _ClassVar[NodeKind]
    COPY: _ClassVar[NodeKind]
    FILL: _ClassVar[NodeKind]
    EMPTY: _ClassVar[NodeKind]
    CHILD: _ClassVar[NodeKind]
    CONDITIONAL: _ClassVar[NodeKind]
    LOAD_CAPTURE: _ClassVar[NodeKind]

class RelocationKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELOCATION_KIND_UNSPECIFIED: _ClassVar[RelocationKind]
    BUFFER_ADDRESS: _ClassVar[RelocationKind]
    PEER_ADDRESS: _ClassVar[RelocationKind]
    MULTICAST_ADDRESS: _ClassVar[RelocationKind]
    SYMBOL_VALUE: _ClassVar[RelocationKind]
    TENSOR_MAP_ADDRESS: _ClassVar[RelocationKind]
    CONDITIONAL_HANDLE: _ClassVar[RelocationKind]
    RANK_VALUE: _ClassVar[RelocationKind]
BUFFER_CLASS_UNSPECIFIED: BufferClass
WEIGHTS: BufferClass
KV_ARENA: BufferClass
STATE: BufferClass
SCRATCH: BufferClass
IO: BufferClass
POINTER_TABLE: BufferClass
SYMMETRIC: BufferClass
MODULE_KIND_UNSPECIFIED: ModuleKind
CUBIN: ModuleKind
PTX: ModuleKind
CPU_REGISTRY: ModuleKind
PARAM_TYPE_UNSPECIFIED: ParamType
POINTER: ParamType
SCALAR: ParamType
TENSOR_MAP: ParamType
HANDLE: ParamType
STRUCT: ParamType
NODE_KIND_UNSPECIFIED: NodeKind
KERNEL: NodeKind
COPY: NodeKind
FILL: NodeKind
EMPTY: NodeKind
CHILD: NodeKind
CONDITIONAL: NodeKind
LOAD_CAPTURE: NodeKind
RELOCATION_KIND_UNSPECIFIED: RelocationKind
BUFFER_ADDRESS: RelocationKind
PEER_ADDRESS: RelocationKind
MULTICAST_ADDRESS: RelocationKind
SYMBOL_VALUE: RelocationKind
TENSOR_MAP_ADDRESS: RelocationKind
CONDITIONAL_HANDLE: RelocationKind
RANK_VALUE: RelocationKind

class Buffer(_message.Message):
    __slots__ = ("buffer_id", "name", "buffer_class", "fixed_bytes", "size_terms", "alignment", "blob_id", "initial", "data_relocations", "alias_group", "host_mapped", "device_target")
    BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUFFER_CLASS_FIELD_NUMBER: _ClassVar[int]
    FIXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_TERMS_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    DATA_RELOCATIONS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_GROUP_FIELD_NUMBER: _ClassVar[int]
    HOST_MAPPED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TARGET_FIELD_NUMBER: _ClassVar[int]
    buffer_id: int
    name: str
    buffer_class: BufferClass
    fixed_bytes: int
    size_terms: _containers.RepeatedCompositeFieldContainer[SizeTerm]
    alignment: int
    blob_id: int
    initial: _weights_pb2.FileRef
    data_relocations: _containers.RepeatedCompositeFieldContainer[DataRelocation]
    alias_group: int
    host_mapped: bool
    device_target: int
    def __init__(self, buffer_id: _Optional[int] = ..., name: _Optional[str] = ..., buffer_class: _Optional[_Union[BufferClass, str]] = ..., fixed_bytes: _Optional[int] = ..., size_terms: _Optional[_Iterable[_Union[SizeTerm, _Mapping]]] = ..., alignment: _Optional[int] = ..., blob_id: _Optional[int] = ..., initial: _Optional[_Union[_weights_pb2.FileRef, _Mapping]] = ..., data_relocations: _Optional[_Iterable[_Union[DataRelocation, _Mapping]]] = ..., alias_group: _Optional[int] = ..., host_mapped: bool = ..., device_target: _Optional[int] = ...) -> None: ...

class SizeTerm(_message.Message):
    __slots__ = ("symbol_id", "bytes")
    SYMBOL_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    symbol_id: int
    bytes: int
    def __init__(self, symbol_id: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class DataRelocation(_message.Message):
    __slots__ = ("offset", "buffer_id", "addend")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDEND_FIELD_NUMBER: _ClassVar[int]
    offset: int
    buffer_id: int
    addend: int
    def __init__(self, offset: _Optional[int] = ..., buffer_id: _Optional[int] = ..., addend: _Optional[int] = ...) -> None: ...

class Symbol(_message.Message):
    __slots__ = ("symbol_id", "name", "width", "minimum", "maximum", "default_value")
    SYMBOL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
    symbol_id: int
    name: str
    width: int
    minimum: int
    maximum: int
    default_value: int
    def __init__(self, symbol_id: _Optional[int] = ..., name: _Optional[str] = ..., width: _Optional[int] = ..., minimum: _Optional[int] = ..., maximum: _Optional[int] = ..., default_value: _Optional[int] = ...) -> None: ...

class KernelModule(_message.Message):
    __slots__ = ("module_id", "kind", "target", "file", "toolchain", "min_driver", "ptx_version", "source_sha256", "registry", "registry_version")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    TOOLCHAIN_FIELD_NUMBER: _ClassVar[int]
    MIN_DRIVER_FIELD_NUMBER: _ClassVar[int]
    PTX_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SHA256_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_VERSION_FIELD_NUMBER: _ClassVar[int]
    module_id: int
    kind: ModuleKind
    target: str
    file: _weights_pb2.FileRef
    toolchain: Toolchain
    min_driver: int
    ptx_version: int
    source_sha256: bytes
    registry: str
    registry_version: int
    def __init__(self, module_id: _Optional[int] = ..., kind: _Optional[_Union[ModuleKind, str]] = ..., target: _Optional[str] = ..., file: _Optional[_Union[_weights_pb2.FileRef, _Mapping]] = ..., toolchain: _Optional[_Union[Toolchain, _Mapping]] = ..., min_driver: _Optional[int] = ..., ptx_version: _Optional[int] = ..., source_sha256: _Optional[bytes] = ..., registry: _Optional[str] = ..., registry_version: _Optional[int] = ...) -> None: ...

class Toolchain(_message.Message):
    __slots__ = ("compiler", "version", "assembler", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COMPILER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    compiler: str
    version: str
    assembler: str
    options: _containers.ScalarMap[str, str]
    def __init__(self, compiler: _Optional[str] = ..., version: _Optional[str] = ..., assembler: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Kernel(_message.Message):
    __slots__ = ("kernel_id", "name", "variants", "op")
    KERNEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    kernel_id: int
    name: str
    variants: _containers.RepeatedCompositeFieldContainer[KernelVariant]
    op: str
    def __init__(self, kernel_id: _Optional[int] = ..., name: _Optional[str] = ..., variants: _Optional[_Iterable[_Union[KernelVariant, _Mapping]]] = ..., op: _Optional[str] = ...) -> None: ...

class KernelVariant(_message.Message):
    __slots__ = ("module_id", "symbol", "params", "block", "required_cluster", "static_shared_bytes", "max_dynamic_shared_bytes", "waits_on_dependency", "triggers_dependents", "scratch_bytes_per_block", "registers", "local_bytes")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_CLUSTER_FIELD_NUMBER: _ClassVar[int]
    STATIC_SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_DYNAMIC_SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITS_ON_DEPENDENCY_FIELD_NUMBER: _ClassVar[int]
    TRIGGERS_DEPENDENTS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    REGISTERS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    module_id: int
    symbol: str
    params: _containers.RepeatedCompositeFieldContainer[ParamSlot]
    block: Dim3
    required_cluster: Dim3
    static_shared_bytes: int
    max_dynamic_shared_bytes: int
    waits_on_dependency: bool
    triggers_dependents: bool
    scratch_bytes_per_block: int
    registers: int
    local_bytes: int
    def __init__(self, module_id: _Optional[int] = ..., symbol: _Optional[str] = ..., params: _Optional[_Iterable[_Union[ParamSlot, _Mapping]]] = ..., block: _Optional[_Union[Dim3, _Mapping]] = ..., required_cluster: _Optional[_Union[Dim3, _Mapping]] = ..., static_shared_bytes: _Optional[int] = ..., max_dynamic_shared_bytes: _Optional[int] = ..., waits_on_dependency: bool = ..., triggers_dependents: bool = ..., scratch_bytes_per_block: _Optional[int] = ..., registers: _Optional[int] = ..., local_bytes: _Optional[int] = ...) -> None: ...

class ParamSlot(_message.Message):
    __slots__ = ("size", "type", "name")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    size: int
    type: ParamType
    name: str
    def __init__(self, size: _Optional[int] = ..., type: _Optional[_Union[ParamType, str]] = ..., name: _Optional[str] = ...) -> None: ...

class Dim3(_message.Message):
    __slots__ = ("x", "y", "z")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    Z_FIELD_NUMBER: _ClassVar[int]
    x: int
    y: int
    z: int
    def __init__(self, x: _Optional[int] = ..., y: _Optional[int] = ..., z: _Optional[int] = ...) -> None: ...

class DeviceTarget(_message.Message):
    __slots__ = ("target_id", "name", "module_ids", "min_sm_count", "exact_sm_count", "min_shared_optin_bytes", "device_features")
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODULE_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_SM_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXACT_SM_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_SHARED_OPTIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FEATURES_FIELD_NUMBER: _ClassVar[int]
    target_id: int
    name: str
    module_ids: _containers.RepeatedScalarFieldContainer[int]
    min_sm_count: int
    exact_sm_count: int
    min_shared_optin_bytes: int
    device_features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, target_id: _Optional[int] = ..., name: _Optional[str] = ..., module_ids: _Optional[_Iterable[int]] = ..., min_sm_count: _Optional[int] = ..., exact_sm_count: _Optional[int] = ..., min_shared_optin_bytes: _Optional[int] = ..., device_features: _Optional[_Iterable[str]] = ...) -> None: ...

class GraphFile(_message.Message):
    __slots__ = ("target_id", "rank", "file", "graph_names")
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    GRAPH_NAMES_FIELD_NUMBER: _ClassVar[int]
    target_id: int
    rank: int
    file: _weights_pb2.FileRef
    graph_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, target_id: _Optional[int] = ..., rank: _Optional[int] = ..., file: _Optional[_Union[_weights_pb2.FileRef, _Mapping]] = ..., graph_names: _Optional[_Iterable[str]] = ...) -> None: ...

class GraphSet(_message.Message):
    __slots__ = ("format_version", "templates", "graphs")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    templates: _containers.RepeatedCompositeFieldContainer[GraphTemplate]
    graphs: _containers.RepeatedCompositeFieldContainer[Graph]
    def __init__(self, format_version: _Optional[int] = ..., templates: _Optional[_Iterable[_Union[GraphTemplate, _Mapping]]] = ..., graphs: _Optional[_Iterable[_Union[Graph, _Mapping]]] = ...) -> None: ...

class GraphTemplate(_message.Message):
    __slots__ = ("template_id", "nodes", "edges", "topology_sha256")
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_SHA256_FIELD_NUMBER: _ClassVar[int]
    template_id: int
    nodes: _containers.RepeatedCompositeFieldContainer[GraphNode]
    edges: _containers.RepeatedCompositeFieldContainer[GraphEdge]
    topology_sha256: bytes
    def __init__(self, template_id: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[GraphNode, _Mapping]]] = ..., edges: _Optional[_Iterable[_Union[GraphEdge, _Mapping]]] = ..., topology_sha256: _Optional[bytes] = ...) -> None: ...

class Graph(_message.Message):
    __slots__ = ("name", "role", "bucket", "template_id", "nodes", "edges", "overrides", "input_buffers", "output_buffers", "conditionals", "load_priority", "component_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    INPUT_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONALS_FIELD_NUMBER: _ClassVar[int]
    LOAD_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    bucket: Bucket
    template_id: int
    nodes: _containers.RepeatedCompositeFieldContainer[GraphNode]
    edges: _containers.RepeatedCompositeFieldContainer[GraphEdge]
    overrides: _containers.RepeatedCompositeFieldContainer[NodeOverride]
    input_buffers: _containers.RepeatedScalarFieldContainer[int]
    output_buffers: _containers.RepeatedScalarFieldContainer[int]
    conditionals: _containers.RepeatedCompositeFieldContainer[Conditional]
    load_priority: int
    component_id: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., bucket: _Optional[_Union[Bucket, _Mapping]] = ..., template_id: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[GraphNode, _Mapping]]] = ..., edges: _Optional[_Iterable[_Union[GraphEdge, _Mapping]]] = ..., overrides: _Optional[_Iterable[_Union[NodeOverride, _Mapping]]] = ..., input_buffers: _Optional[_Iterable[int]] = ..., output_buffers: _Optional[_Iterable[int]] = ..., conditionals: _Optional[_Iterable[_Union[Conditional, _Mapping]]] = ..., load_priority: _Optional[int] = ..., component_id: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("batch", "query_tokens", "max_context")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    batch: int
    query_tokens: int
    max_context: int
    def __init__(self, batch: _Optional[int] = ..., query_tokens: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

class GraphNode(_message.Message):
    __slots__ = ("node_id", "kind", "kernel_id", "grid", "block", "cluster", "dynamic_shared_bytes", "param_block", "relocations", "attributes", "copy", "fill", "conditional_id", "child_template", "load_capture", "accesses", "debug_name")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KERNEL_ID_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAM_BLOCK_FIELD_NUMBER: _ClassVar[int]
    RELOCATIONS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    CONDITIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_CAPTURE_FIELD_NUMBER: _ClassVar[int]
    ACCESSES_FIELD_NUMBER: _ClassVar[int]
    DEBUG_NAME_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    kind: NodeKind
    kernel_id: int
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_shared_bytes: int
    param_block: bytes
    relocations: _containers.RepeatedCompositeFieldContainer[Relocation]
    attributes: _containers.RepeatedCompositeFieldContainer[LaunchAttribute]
    copy: CopyParams
    fill: FillParams
    conditional_id: int
    child_template: int
    load_capture: str
    accesses: _containers.RepeatedCompositeFieldContainer[Access]
    debug_name: str
    def __init__(self, node_id: _Optional[int] = ..., kind: _Optional[_Union[NodeKind, str]] = ..., kernel_id: _Optional[int] = ..., grid: _Optional[_Union[Dim3, _Mapping]] = ..., block: _Optional[_Union[Dim3, _Mapping]] = ..., cluster: _Optional[_Union[Dim3, _Mapping]] = ..., dynamic_shared_bytes: _Optional[int] = ..., param_block: _Optional[bytes] = ..., relocations: _Optional[_Iterable[_Union[Relocation, _Mapping]]] = ..., attributes: _Optional[_Iterable[_Union[LaunchAttribute, _Mapping]]] = ..., copy: _Optional[_Union[CopyParams, _Mapping]] = ..., fill: _Optional[_Union[FillParams, _Mapping]] = ..., conditional_id: _Optional[int] = ..., child_template: _Optional[int] = ..., load_capture: _Optional[str] = ..., accesses: _Optional[_Iterable[_Union[Access, _Mapping]]] = ..., debug_name: _Optional[str] = ...) -> None: ...

class GraphEdge(_message.Message):
    __slots__ = ("to", "from_port", "type")
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    FROM_PORT_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    to: int
    from_port: int
    type: int
    def __init__(self, to: _Optional[int] = ..., from_port: _Optional[int] = ..., type: _Optional[int] = ..., **kwargs) -> None: ...

class NodeOverride(_message.Message):
    __slots__ = ("node_id", "grid", "dynamic_shared_bytes", "params", "relocations", "kernel_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    RELOCATIONS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    grid: Dim3
    dynamic_shared_bytes: int
    params: _containers.RepeatedCompositeFieldContainer[ParamPatch]
    relocations: _containers.RepeatedCompositeFieldContainer[Relocation]
    kernel_id: int
    def __init__(self, node_id: _Optional[int] = ..., grid: _Optional[_Union[Dim3, _Mapping]] = ..., dynamic_shared_bytes: _Optional[int] = ..., params: _Optional[_Iterable[_Union[ParamPatch, _Mapping]]] = ..., relocations: _Optional[_Iterable[_Union[Relocation, _Mapping]]] = ..., kernel_id: _Optional[int] = ...) -> None: ...

class ParamPatch(_message.Message):
    __slots__ = ("param_index", "value")
    PARAM_INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    param_index: int
    value: bytes
    def __init__(self, param_index: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class LaunchAttribute(_message.Message):
    __slots__ = ("id", "value")
    ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    id: int
    value: int
    def __init__(self, id: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class Conditional(_message.Message):
    __slots__ = ("conditional_id", "kind", "default_value", "assign_default", "body_templates")
    CONDITIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    BODY_TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    conditional_id: int
    kind: str
    default_value: int
    assign_default: bool
    body_templates: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, conditional_id: _Optional[int] = ..., kind: _Optional[str] = ..., default_value: _Optional[int] = ..., assign_default: bool = ..., body_templates: _Optional[_Iterable[int]] = ...) -> None: ...

class CopyParams(_message.Message):
    __slots__ = ("source", "destination", "bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    source: Relocation
    destination: Relocation
    bytes: int
    def __init__(self, source: _Optional[_Union[Relocation, _Mapping]] = ..., destination: _Optional[_Union[Relocation, _Mapping]] = ..., bytes: _Optional[int] = ...) -> None: ...

class FillParams(_message.Message):
    __slots__ = ("destination", "value", "element_bytes", "count")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    destination: Relocation
    value: int
    element_bytes: int
    count: int
    def __init__(self, destination: _Optional[_Union[Relocation, _Mapping]] = ..., value: _Optional[int] = ..., element_bytes: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Access(_message.Message):
    __slots__ = ("buffer_id", "offset", "bytes", "write")
    BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    buffer_id: int
    offset: int
    bytes: int
    write: bool
    def __init__(self, buffer_id: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., write: bool = ...) -> None: ...

class Relocation(_message.Message):
    __slots__ = ("kind", "param_index", "offset", "buffer_id", "addend", "symbol_id", "peer", "width", "tensor_map", "conditional_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARAM_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BUFFER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDEND_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TENSOR_MAP_FIELD_NUMBER: _ClassVar[int]
    CONDITIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    kind: RelocationKind
    param_index: int
    offset: int
    buffer_id: int
    addend: int
    symbol_id: int
    peer: int
    width: int
    tensor_map: TensorMapSpec
    conditional_id: int
    def __init__(self, kind: _Optional[_Union[RelocationKind, str]] = ..., param_index: _Optional[int] = ..., offset: _Optional[int] = ..., buffer_id: _Optional[int] = ..., addend: _Optional[int] = ..., symbol_id: _Optional[int] = ..., peer: _Optional[int] = ..., width: _Optional[int] = ..., tensor_map: _Optional[_Union[TensorMapSpec, _Mapping]] = ..., conditional_id: _Optional[int] = ...) -> None: ...

class TensorMapSpec(_message.Message):
    __slots__ = ("dtype", "dims", "stride_bytes", "box", "element_strides", "swizzle", "interleave", "l2_promotion", "oob_fill", "dim_symbols")
    class DimSymbolsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_STRIDES_FIELD_NUMBER: _ClassVar[int]
    SWIZZLE_FIELD_NUMBER: _ClassVar[int]
    INTERLEAVE_FIELD_NUMBER: _ClassVar[int]
    L2_PROMOTION_FIELD_NUMBER: _ClassVar[int]
    OOB_FILL_FIELD_NUMBER: _ClassVar[int]
    DIM_SYMBOLS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    dims: _containers.RepeatedScalarFieldContainer[int]
    stride_bytes: _containers.RepeatedScalarFieldContainer[int]
    box: _containers.RepeatedScalarFieldContainer[int]
    element_strides: _containers.RepeatedScalarFieldContainer[int]
    swizzle: int
    interleave: int
    l2_promotion: int
    oob_fill: int
    dim_symbols: _containers.ScalarMap[int, int]
    def __init__(self, dtype: _Optional[str] = ..., dims: _Optional[_Iterable[int]] = ..., stride_bytes: _Optional[_Iterable[int]] = ..., box: _Optional[_Iterable[int]] = ..., element_strides: _Optional[_Iterable[int]] = ..., swizzle: _Optional[int] = ..., interleave: _Optional[int] = ..., l2_promotion: _Optional[int] = ..., oob_fill: _Optional[int] = ..., dim_symbols: _Optional[_Mapping[int, int]] = ...) -> None: ...
