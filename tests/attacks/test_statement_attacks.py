"""Cores re-signed with a trusted key, through a bug or a stolen key: what they state is still checked."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.trust import TrustPolicy
from runtime.verify import verify
from tests.attacks.limits import refused
from tests.toy_core import Edit, ToyCore, with_root


@pytest.mark.parametrize("name", [
    pytest.param("../x", id="parent"),
    pytest.param("/x", id="absolute"),
    pytest.param("a//b", id="empty part"),
    pytest.param("./a", id="dot first"),
    pytest.param("a/../b", id="parent inside"),
    pytest.param("a/..", id="parent last"),
    pytest.param("a/", id="slash last"),
    pytest.param("a\\b", id="backslash"),
    pytest.param("A", id="capital"),
    pytest.param("CON.", id="reserved"),
    pytest.param("con.", id="dot last"),
    pytest.param("", id="empty"),
    pytest.param("a\0", id="NUL"),
    pytest.param("a\n", id="newline last"),
    pytest.param("a b", id="space"),
    pytest.param("‮a", id="right-to-left override"),
    pytest.param("\ud800", id="lone surrogate"),
    pytest.param("é", id="accent"),
    pytest.param("٣", id="foreign digit"),
    pytest.param(".git", id="hidden"),
    pytest.param("-a", id="dash first"),
    pytest.param("a/b/c/d", id="four parts"),
    pytest.param("a" * 161, id="161 characters"),
    pytest.param("\x1b[31ma", id="terminal escape"),
])
def test_rejects_name(toy: ToyCore, trust: TrustPolicy, name: str) -> None:
    toy.sign(statement=with_root(lambda resources: resources[0].update(name=name)))

    with refused("STMT_NAME"):
        verify(toy.path, trust)


def repeat_name_with_wrong_digest_first(resources: list[dict[str, Any]]) -> None:
    resources.insert(0, {**resources[-1], "digest": "00" * 32})


def root_of_other_files(statement: dict[str, Any]) -> None:
    statement["subject"][0]["digest"]["sha256"] = "11" * 32


def root_of_reversed_files(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"].reverse()


def root_absent(statement: dict[str, Any]) -> None:
    statement["subject"][0]["digest"] = {"sha512": "11" * 64}


@pytest.mark.parametrize(("edit", "code"), [
    pytest.param(with_root(repeat_name_with_wrong_digest_first), "STMT_NAME", id="one name twice"),
    pytest.param(root_of_other_files, "STMT_ROOT", id="root of other files"),
    pytest.param(root_of_reversed_files, "STMT_ROOT", id="root in another order"),
    pytest.param(root_absent, "STMT_ROOT", id="no root"),
])
def test_rejects_statement_that_contradicts_itself(toy: ToyCore, trust: TrustPolicy, edit: Edit, code: str) -> None:
    toy.sign(statement=edit)

    with refused(code):
        verify(toy.path, trust)
