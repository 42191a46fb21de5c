from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Recipe(_message.Message):
    __slots__ = ("name", "kind", "architectures", "forward_implemented", "symbols", "tensors", "conversions", "name_prefixes", "layer_types")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_IMPLEMENTED_FIELD_NUMBER: _ClassVar[int]
    SYMBOLS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CONVERSIONS_FIELD_NUMBER: _ClassVar[int]
    NAME_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    LAYER_TYPES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    architectures: _containers.RepeatedScalarFieldContainer[str]
    forward_implemented: bool
    symbols: _containers.RepeatedCompositeFieldContainer[ConfigSymbol]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorRow]
    conversions: _containers.RepeatedCompositeFieldContainer[Conversion]
    name_prefixes: _containers.RepeatedScalarFieldContainer[str]
    layer_types: _containers.RepeatedCompositeFieldContainer[LayerType]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., architectures: _Optional[_Iterable[str]] = ..., forward_implemented: bool = ..., symbols: _Optional[_Iterable[_Union[ConfigSymbol, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorRow, _Mapping]]] = ..., conversions: _Optional[_Iterable[_Union[Conversion, _Mapping]]] = ..., name_prefixes: _Optional[_Iterable[str]] = ..., layer_types: _Optional[_Iterable[_Union[LayerType, _Mapping]]] = ...) -> None: ...

class LayerType(_message.Message):
    __slots__ = ("name", "keys", "first_number", "value", "every", "other_than")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    OTHER_THAN_FIELD_NUMBER: _ClassVar[int]
    name: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    first_number: int
    value: str
    every: str
    other_than: str
    def __init__(self, name: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., first_number: _Optional[int] = ..., value: _Optional[str] = ..., every: _Optional[str] = ..., other_than: _Optional[str] = ..., **kwargs) -> None: ...

class ConfigSymbol(_message.Message):
    __slots__ = ("name", "keys", "expression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    keys: _containers.RepeatedScalarFieldContainer[str]
    expression: str
    def __init__(self, name: _Optional[str] = ..., keys: _Optional[_Iterable[str]] = ..., expression: _Optional[str] = ...) -> None: ...

class TensorRow(_message.Message):
    __slots__ = ("pattern", "shape", "role", "optional", "groups", "keep_reason", "layer_type", "fused_group", "ignored", "other_names", "passthrough")
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    OPTIONAL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    KEEP_REASON_FIELD_NUMBER: _ClassVar[int]
    LAYER_TYPE_FIELD_NUMBER: _ClassVar[int]
    FUSED_GROUP_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAMES_FIELD_NUMBER: _ClassVar[int]
    PASSTHROUGH_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    shape: _containers.RepeatedScalarFieldContainer[str]
    role: str
    optional: bool
    groups: _containers.RepeatedScalarFieldContainer[str]
    keep_reason: str
    layer_type: str
    fused_group: str
    ignored: bool
    other_names: _containers.RepeatedScalarFieldContainer[str]
    passthrough: bool
    def __init__(self, pattern: _Optional[str] = ..., shape: _Optional[_Iterable[str]] = ..., role: _Optional[str] = ..., optional: bool = ..., groups: _Optional[_Iterable[str]] = ..., keep_reason: _Optional[str] = ..., layer_type: _Optional[str] = ..., fused_group: _Optional[str] = ..., ignored: bool = ..., other_names: _Optional[_Iterable[str]] = ..., passthrough: bool = ...) -> None: ...

class Conversion(_message.Message):
    __slots__ = ("group", "values")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    group: str
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., values: _Optional[_Iterable[str]] = ...) -> None: ...
