from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DigestAlgorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIGEST_ALGORITHM_UNSPECIFIED: _ClassVar[DigestAlgorithm]
    SHA256: _ClassVar[DigestAlgorithm]
    BLAKE3_256: _ClassVar[DigestAlgorithm]
DIGEST_ALGORITHM_UNSPECIFIED: DigestAlgorithm
SHA256: DigestAlgorithm
BLAKE3_256: DigestAlgorithm

class FileRef(_message.Message):
    __slots__ = ("algorithm", "digest", "size_bytes")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    algorithm: DigestAlgorithm
    digest: bytes
    size_bytes: int
    def __init__(self, algorithm: _Optional[_Union[DigestAlgorithm, str]] = ..., digest: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FileEntry(_message.Message):
    __slots__ = ("ref", "path", "role", "chunk_bytes", "chunk_digests")
    REF_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    ref: FileRef
    path: str
    role: str
    chunk_bytes: int
    chunk_digests: bytes
    def __init__(self, ref: _Optional[_Union[FileRef, _Mapping]] = ..., path: _Optional[str] = ..., role: _Optional[str] = ..., chunk_bytes: _Optional[int] = ..., chunk_digests: _Optional[bytes] = ...) -> None: ...

class WeightBlob(_message.Message):
    __slots__ = ("blob_id", "file", "alignment", "rank")
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    blob_id: int
    file: FileRef
    alignment: int
    rank: int
    def __init__(self, blob_id: _Optional[int] = ..., file: _Optional[_Union[FileRef, _Mapping]] = ..., alignment: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class TensorView(_message.Message):
    __slots__ = ("name", "blob_id", "offset_bytes", "size_bytes", "dtype", "shape", "strides", "format", "scale_view", "source_tensors", "recipe", "sha256", "owner", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    SCALE_VIEW_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TENSORS_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    blob_id: int
    offset_bytes: int
    size_bytes: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    strides: _containers.RepeatedScalarFieldContainer[int]
    format: str
    scale_view: str
    source_tensors: _containers.RepeatedScalarFieldContainer[str]
    recipe: str
    sha256: bytes
    owner: str
    shard: ShardSpec
    def __init__(self, name: _Optional[str] = ..., blob_id: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., strides: _Optional[_Iterable[int]] = ..., format: _Optional[str] = ..., scale_view: _Optional[str] = ..., source_tensors: _Optional[_Iterable[str]] = ..., recipe: _Optional[str] = ..., sha256: _Optional[bytes] = ..., owner: _Optional[str] = ..., shard: _Optional[_Union[ShardSpec, _Mapping]] = ...) -> None: ...

class ShardSpec(_message.Message):
    __slots__ = ("axis", "index", "count")
    AXIS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    axis: int
    index: int
    count: int
    def __init__(self, axis: _Optional[int] = ..., index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...
