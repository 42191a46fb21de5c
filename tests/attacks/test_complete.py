"""The list of attacks and the list of error codes are complete: each row has its tests, each code is reached by one.

The rows are those of the table in docs/trust.md. A row's tests carry its number in their ids, or are named here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent

# Rows whose tests do not carry the number in their ids: file and test functions.
NAMED: dict[int, tuple[str, list[str]]] = {
    1: ("test_signature_attacks", ["test_rejects_core_without_signatures_directory",
                                   "test_rejects_core_with_empty_signatures_directory"]),
    2: ("test_signature_attacks", ["test_rejects_one_flipped_bit"]),
    3: ("test_signature_attacks", ["test_rejects_forged_signature"]),
    4: ("test_signature_attacks", ["test_rejects_forged_signature"]),
    7: ("test_signature_attacks", ["test_rejects_attackers_signature_under_trusted_hint"]),
    10: ("test_trust_attacks", ["test_rejects_trust_file_with_key_of_another_kind"]),
    11: ("test_bundle_rows", ["test_rejects_bundle_with"]),
    20: ("test_statement_attacks", ["test_rejects_name"]),
    21: ("test_statement_attacks", ["test_rejects_statement_that_contradicts_itself"]),
    22: ("test_file_attacks", ["test_rejects_one_changed_byte"]),
    23: ("test_file_attacks", ["test_rejects_file_of_another_size"]),
    24: ("test_file_attacks", ["test_rejects_core_without_a_listed_file", "test_rejects_added_file",
                               "test_rejects_added_empty_directory"]),
    25: ("test_file_attacks", ["test_rejects_what_is_not_a_regular_file"]),
    26: ("test_file_attacks", ["test_rejects_two_files_exchanged"]),
    41: ("test_policy_rows", ["test_loads_the_signed_bytes_of_a_file_that_was_exchanged_after_opening"]),
}

CODES = [
    "POLICY_MISSING", "POLICY_MALFORMED", "POLICY_UNSAFE", "KEY_UNSUPPORTED", "SIG_MISSING", "SIG_LIMIT",
    "SIG_MALFORMED", "SIG_INVALID", "SIG_CONFLICT", "ROLE_UNMET", "KEY_REVOKED", "STMT_TYPE", "STMT_MALFORMED",
    "STMT_UNSUPPORTED", "STMT_NAME", "STMT_ROOT", "FILE_MISSING", "FILE_EXTRA", "FILE_TYPE", "FILE_SIZE",
    "DIGEST_MISMATCH", "CHUNK_MISMATCH", "CORE_REVOKED", "CORE_ROLLBACK", "MANIFEST_LIMIT", "MANIFEST_MALFORMED",
    "MANIFEST_TABLE", "MANIFEST_UNKNOWN", "VIEW_RANGE", "VIEW_SHAPE", "VIEW_OVERLAP", "GRAPH_REF", "GRAPH_CYCLE",
    "GRAPH_LIMIT", "RELOC_RANGE", "KERNEL_IMAGE", "BUNDLE_MALFORMED", "VERSION_UNSUPPORTED", "FEATURE_UNSUPPORTED",
]


def constants(path: Path) -> Iterator[str]:
    """Every string in a file that is no docstring."""
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def raised(folder: Path) -> set[str]:
    """Codes that the verifying modules raise: the first argument of an error, or of the helpers around one."""
    found = set()
    for path in folder.glob("*.py"):
        for text in constants(path):
            if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", text) and text in CODES:
                found.add(text)
    return found


@pytest.mark.parametrize("row", range(1, 45))
def test_every_row_has_its_tests(row: int) -> None:
    folder = TESTS / "attacks"
    if row in NAMED:
        module, names = NAMED[row]
        assert set(names) <= functions(folder / f"{module}.py")
        return
    ids = {text for path in folder.glob("test_*.py") if path.name != Path(__file__).name for text in constants(path)}

    assert any(re.match(rf"{row} \S", text) for text in ids)


def test_every_error_code_is_raised_somewhere() -> None:
    assert sorted(set(CODES) - raised(ROOT / "runtime")) == []


def test_every_error_code_is_reached_by_an_attack_on_a_whole_core() -> None:
    reached = {text for path in (TESTS / "attacks").glob("test_*.py") if path.name != Path(__file__).name
               for text in constants(path)}

    assert sorted(set(CODES) - reached) == []


def test_every_error_code_is_explained() -> None:
    page = (ROOT / "docs" / "trust.md").read_text("utf-8")

    assert [code for code in CODES if f"`{code}`" not in page] == []
