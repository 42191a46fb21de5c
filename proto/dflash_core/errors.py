"""The errors that dflash raises: one class per remedy, each with a code, a place and something to do.

    raise CheckpointError(
        "TENSOR_SHAPE", "shape disagrees with the config",
        where="model.layers.3.mlp.down_proj.weight in model-00002-of-00007.safetensors",
        expected="[4096, 14336]", got="[4096, 14335]", hint="re-download the shard",
    )
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar


class ExitCode(IntEnum):
    """What a command's exit status means."""

    OK = 0
    BUG = 1
    USAGE = 2
    BAD_INPUT = 3
    NOT_AUTHENTIC = 4
    INCOMPATIBLE = 5
    RESOURCES = 6
    QUALITY = 7


class DflashError(Exception):
    """Something that the person who runs dflash can act on.

    Args:
        code: stable upper-case name of the rule that was broken; scripts match on it.
        what: one lower-case sentence without a final stop.
        where: file, tensor, node or field concerned.
        expected, got: both sides of the comparison that failed, as short text.
        hint: the next thing to do.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(
        self, code: str, what: str, *, where: str = "", expected: Any = None, got: Any = None, hint: str = ""
    ) -> None:
        self.code = code
        self.what = what
        self.where = where
        self.expected = None if expected is None else str(expected)
        self.got = None if got is None else str(got)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what
        if self.expected is not None:
            text += f": expected {self.expected}"
        if self.got is not None:
            text += f"{',' if self.expected is not None else ':'} got {self.got}"
        if self.where:
            text += f"\n   at: {self.where}"
        if self.hint:
            text += f"\n hint: {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.as_dict())

    def as_dict(self) -> dict[str, str | None]:
        """The error as one flat JSON object, for `--json`."""
        return {
            "code": self.code, "what": self.what, "where": self.where,
            "expected": self.expected, "got": self.got, "hint": self.hint,
        }


def _rebuild(cls: type[DflashError], fields: dict[str, Any]) -> DflashError:
    return cls(fields.pop("code"), fields.pop("what"), **fields)


class UsageError(DflashError):
    """The command line asks for something that does not go together."""

    exit_code = ExitCode.USAGE


class RecipeError(DflashError):
    """A recipe is malformed, or does not describe this checkpoint."""

    exit_code = ExitCode.BAD_INPUT


class CheckpointError(DflashError):
    """A checkpoint is missing, damaged, or not of a kind that dflash reads."""

    exit_code = ExitCode.BAD_INPUT


class PlanError(DflashError):
    """A precision setting cannot be applied to this model."""

    exit_code = ExitCode.BAD_INPUT


class ConvertError(DflashError):
    """A tensor cannot be converted to the planned format."""

    exit_code = ExitCode.BAD_INPUT


class CaptureError(DflashError):
    """A program could not be recorded, compiled or witnessed."""

    exit_code = ExitCode.BUG


class PolicyError(DflashError):
    """The trust file is missing, malformed or unsafe."""

    exit_code = ExitCode.NOT_AUTHENTIC


class VerificationError(DflashError):
    """The core is not exactly what trusted keys have signed."""

    exit_code = ExitCode.NOT_AUTHENTIC


class FormatError(DflashError):
    """The core is signed, but breaks a structure rule."""

    exit_code = ExitCode.INCOMPATIBLE


class CompatibilityError(DflashError):
    """This runtime, device or request does not fit the core."""

    exit_code = ExitCode.INCOMPATIBLE


class ResourceError(DflashError):
    """Disk, memory or permission is lacking on this machine."""

    exit_code = ExitCode.RESOURCES


class DriverError(DflashError):
    """A CUDA driver call failed; `code` is the CUDA name."""

    exit_code = ExitCode.RESOURCES


class ImageError(DflashError):
    """An image cannot be read, is larger than allowed, or does not fit the prompt it is meant for."""

    exit_code = ExitCode.BAD_INPUT


class QualityError(DflashError):
    """A quality gate did not hold."""

    exit_code = ExitCode.QUALITY
