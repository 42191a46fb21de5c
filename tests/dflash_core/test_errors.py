"""An error says what, where, expected, got and what to do, in one form, and survives a process boundary."""

import pickle

import pytest
from dflash_core import errors
from dflash_core.errors import CheckpointError, ConvertError, DflashError, ExitCode, ResourceError

FULL = ConvertError("BLOCK_DIVISION", "row does not divide into NVFP4 blocks", where="down_proj in model.safetensors",
                    expected="a multiple of 16", got=14335, hint="keep this tensor in checkpoint precision")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({}, "it broke", id="what alone"),
        pytest.param({"expected": 3}, "it broke: expected 3", id="expected"),
        pytest.param({"got": 4}, "it broke: got 4", id="got"),
        pytest.param({"expected": 3, "got": 4}, "it broke: expected 3, got 4", id="both"),
        pytest.param({"expected": "", "got": 0}, "it broke: expected , got 0", id="zero and empty are values"),
        pytest.param({"where": "here"}, "it broke\n   at: here", id="where"),
        pytest.param({"hint": "mend it"}, "it broke\n hint: mend it", id="hint"),
        pytest.param({"expected": [1], "got": (2,), "where": "here", "hint": "mend it"},
                     "it broke: expected [1], got (2,)\n   at: here\n hint: mend it", id="all"),
    ],
)
def test_message_has_one_form(fields, text):
    assert str(DflashError("CODE", "it broke", **fields)) == text


def test_error_is_one_flat_object_of_text():
    assert FULL.as_dict() == {
        "code": "BLOCK_DIVISION", "what": "row does not divide into NVFP4 blocks",
        "where": "down_proj in model.safetensors", "expected": "a multiple of 16", "got": "14335",
        "hint": "keep this tensor in checkpoint precision",
    }
    assert DflashError("CODE", "it broke").as_dict() == {
        "code": "CODE", "what": "it broke", "where": "", "expected": None, "got": None, "hint": ""}


@pytest.mark.parametrize("error", [FULL, ResourceError("MEMORY", "it does not fit"), DflashError("X", "y", got=0)],
                         ids=["full", "short", "base"])
def test_error_crosses_a_process_boundary_unchanged(error):
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert copy.as_dict() == error.as_dict()
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("DflashError", 1), ("UsageError", 2), ("RecipeError", 3), ("CheckpointError", 3), ("PlanError", 3),
        ("ConvertError", 3), ("CaptureError", 1), ("PolicyError", 4), ("VerificationError", 4), ("FormatError", 5),
        ("CompatibilityError", 5), ("ResourceError", 6), ("DriverError", 6), ("ImageError", 3),
        ("QualityError", 7),
    ],
)  # fmt: skip
def test_every_class_has_its_exit_code(name, code):
    assert getattr(errors, name).exit_code == code


def test_table_above_names_every_class():
    classes = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, DflashError)}

    assert len(classes) == 15
    assert all(issubclass(getattr(errors, n), Exception) for n in classes)


def test_exit_codes_keep_their_numbers():
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0, "BUG": 1, "USAGE": 2, "BAD_INPUT": 3, "NOT_AUTHENTIC": 4, "INCOMPATIBLE": 5, "RESOURCES": 6,
        "QUALITY": 7,
    }  # fmt: skip


def test_cause_is_kept_when_a_foreign_error_is_wrapped():
    cause = OSError(28, "full")

    with pytest.raises(CheckpointError) as raised:
        raise CheckpointError("READ_FAILED", "cannot read") from cause

    assert raised.value.__cause__ is cause
