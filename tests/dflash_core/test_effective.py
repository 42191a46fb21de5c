"""The truth tables of effective precision, row by row, and the pairs that combine and weight reuse compare."""

from __future__ import annotations

import pytest
from dflash_core.effective import (
    CHECKPOINT,
    NO_CONVERSION,
    NO_DRAFT,
    NoDraft,
    Origin,
    Role,
    effective_draft_body,
    effective_draft_head,
    effective_precision,
    effective_scope,
    effective_verify_head,
    same_draft_body,
)
from dflash_core.v1.manifest_pb2 import RebuildManifest


def manifest(
    method: str | None = "dflash2", depth: int | None = 7, online: str | None = None, scope: str | None = None,
    body: str | None = None, head: str | None = None, verify: str | None = None,
) -> RebuildManifest:
    """A manifest that records exactly the given fields; None leaves a field absent."""
    made = RebuildManifest(online_quantization=online, online_mxfp8_scope=scope)
    fields = {
        "method": method, "draft_depth": depth, "draft_body_quantization": body,
        "draft_head_quantization": head, "verify_head_precision": verify,
    }
    for name, value in fields.items():
        if value is not None:
            setattr(made.speculation, name, value)
    return made


BODY_ROWS = [
    # method, depth, online, scope, body, effective, origin
    ("dflash2", 7, "mxfp8", "all", None, "mxfp8", Origin.SCOPE),
    ("dflash2", 7, "mxfp8", None, None, "mxfp8", Origin.SCOPE),
    ("dflash2", 7, "mxfp8", "", None, "mxfp8", Origin.SCOPE),
    ("dflash2", 7, "mxfp8", "kda-input", None, "checkpoint", Origin.CHECKPOINT),
    ("dflash2", 7, "mxfp8", "kda-input", "mxfp8", "mxfp8", Origin.FLAG),
    ("dflash2", 7, None, None, None, "checkpoint", Origin.CHECKPOINT),
    ("dflash2", 7, None, None, "mxfp8", "mxfp8", Origin.FLAG),
    ("dspark", 7, "mxfp8", "all", None, "checkpoint", Origin.CHECKPOINT),
    ("dflash2", 7, "mxfp8", "all", "mxfp6", "mxfp6", Origin.FLAG),
    ("dflash2", 0, "mxfp8", "all", "mxfp8", NO_DRAFT, Origin.DEFAULT),
    (None, None, "mxfp8", "all", None, NO_DRAFT, Origin.DEFAULT),
    ("none", 7, "mxfp8", "all", "mxfp8", NO_DRAFT, Origin.DEFAULT),
    ("", 7, "mxfp8", "all", "mxfp8", NO_DRAFT, Origin.DEFAULT),
    ("dflash2", None, "mxfp8", "all", "mxfp8", NO_DRAFT, Origin.DEFAULT),
    (None, 7, "mxfp8", "all", "mxfp8", NO_DRAFT, Origin.DEFAULT),
    ("dflash2", 7, "mxfp8", "some-later-scope", None, "checkpoint", Origin.CHECKPOINT),
    ("dflash2", 7, None, "all", None, "checkpoint", Origin.CHECKPOINT),
    ("dflash2", 7, "", "all", None, "checkpoint", Origin.CHECKPOINT),
    ("dflash2", 7, "mxfp6", "all", None, "checkpoint", Origin.CHECKPOINT),
    ("dflash", 7, "mxfp8", "all", None, "checkpoint", Origin.CHECKPOINT),
    ("a-later-method", 7, "mxfp8", None, None, "checkpoint", Origin.CHECKPOINT),
    ("dspark", 7, "mxfp8", "all", "mxfp8", "mxfp8", Origin.FLAG),
    ("dflash", 7, None, None, "mxfp6", "mxfp6", Origin.FLAG),
    ("dflash2", 7, "mxfp8", "all", "", "mxfp8", Origin.SCOPE),
    ("dflash2", 7, "mxfp8", "all", "checkpoint", "checkpoint", Origin.FLAG),
    ("dflash2", 7, None, None, "no draft", "no draft", Origin.FLAG),
    ("dflash2", 1, "mxfp8", "all", None, "mxfp8", Origin.SCOPE),
]


def row_id(row: tuple[object, ...]) -> str:
    return "/".join("-" if part is None else repr(part) if part == "" else str(part) for part in row[:5])


@pytest.mark.parametrize(
    ("method", "depth", "online", "scope", "body", "effective", "origin"), BODY_ROWS, ids=map(row_id, BODY_ROWS)
)
def test_draft_body_means_what_the_table_says(
    method: str | None, depth: int | None, online: str | None, scope: str | None, body: str | None,
    effective: str | NoDraft, origin: Origin,
) -> None:
    made = manifest(method, depth, online, scope, body)

    report = {row.role: row for row in effective_precision(made)}[Role.DRAFT_BODY]

    assert effective_draft_body(made) == effective
    assert (report.value, report.recorded, report.origin) == (effective, body or None, origin)


def test_absent_speculation_message_is_no_draft() -> None:
    made = RebuildManifest(online_quantization="mxfp8", online_mxfp8_scope="all")

    assert effective_draft_body(made) is NO_DRAFT
    assert not made.HasField("speculation"), "asking must not create the message"


def test_no_draft_equals_no_recordable_string() -> None:
    assert NO_DRAFT != "no draft"
    assert manifest(body="no draft").speculation.draft_body_quantization != NO_DRAFT


PAIRS = [
    ("inherited-and-explicit", manifest(online="mxfp8", scope="all"),
     manifest(online="mxfp8", scope="all", body="mxfp8"), True),
    ("scope-not-recorded-and-explicit-under-kda", manifest(online="mxfp8"),
     manifest(online="mxfp8", scope="kda-input", body="mxfp8"), True),
    ("kda-and-kda-explicit", manifest(online="mxfp8", scope="kda-input"),
     manifest(online="mxfp8", scope="kda-input", body="mxfp8"), False),
    ("off-and-explicit", manifest(), manifest(body="mxfp8"), False),
    ("off-with-inert-scope-and-off", manifest(scope="all"), manifest(), True),
    ("unknown-and-inherited", manifest(online="mxfp8", scope="all", body="mxfp6"),
     manifest(online="mxfp8", scope="all"), False),
    ("unknown-and-same-unknown", manifest(online="mxfp8", scope="all", body="mxfp6"),
     manifest(online="mxfp8", scope="all", body="mxfp6"), True),
    ("dspark-under-all-and-under-kda", manifest("dspark", online="mxfp8", scope="all"),
     manifest("dspark", online="mxfp8", scope="kda-input"), True),
    ("cache-and-request-without-drafts", manifest(online="mxfp8", scope="kda-input"),
     manifest(None, None, "mxfp8", "kda-input"), True),
    ("explicit-cache-and-depth-zero", manifest(body="mxfp8"), manifest(depth=0), True),
    ("bf16-and-literal-no-draft", manifest(), manifest(body="no draft"), False),
]


@pytest.mark.parametrize(("left", "right", "same"), [row[1:] for row in PAIRS], ids=[row[0] for row in PAIRS])
def test_pairs_agree_on_the_body_by_effective_value(
    left: RebuildManifest, right: RebuildManifest, same: bool
) -> None:
    recorded = left.SerializeToString(deterministic=True), right.SerializeToString(deterministic=True)

    assert same_draft_body(left, right) is same
    assert same_draft_body(right, left) is same
    assert (left.SerializeToString(deterministic=True), right.SerializeToString(deterministic=True)) == recorded


SCOPES = [
    ("off", None, None, NO_CONVERSION, "checkpoint", Origin.CHECKPOINT),
    ("off-with-inert-scope", None, "all", NO_CONVERSION, "checkpoint", Origin.CHECKPOINT),
    ("empty-is-off", "", "all", NO_CONVERSION, "checkpoint", Origin.CHECKPOINT),
    ("never-recorded", "mxfp8", None, "all", "mxfp8:all", Origin.DEFAULT),
    ("empty-is-never-recorded", "mxfp8", "", "all", "mxfp8:all", Origin.DEFAULT),
    ("all", "mxfp8", "all", "all", "mxfp8:all", Origin.FLAG),
    ("kda-input", "mxfp8", "kda-input", "kda-input", "mxfp8:kda-input", Origin.FLAG),
    ("unknown-scope-kept", "mxfp8", "mlp", "mlp", "mxfp8:mlp", Origin.FLAG),
    ("unknown-format-kept", "mxfp6", "all", "all", "mxfp6:all", Origin.FLAG),
]


@pytest.mark.parametrize(
    ("online", "scope", "effective", "text", "origin"), [row[1:] for row in SCOPES], ids=[row[0] for row in SCOPES]
)
def test_scope_that_was_never_recorded_means_all(
    online: str | None, scope: str | None, effective: object, text: str, origin: Origin
) -> None:
    made = manifest(online=online, scope=scope)

    report = effective_precision(made)[0]

    assert effective_scope(made) == effective
    assert (report.role, report.text, report.origin) == (Role.TARGET, text, origin)


HEADS = [
    ("absent", manifest(), "checkpoint", Origin.CHECKPOINT, "checkpoint", Origin.CHECKPOINT),
    ("nvfp4", manifest(head="nvfp4"), "nvfp4", Origin.FLAG, "checkpoint", Origin.CHECKPOINT),
    ("mxfp8", manifest(head="mxfp8"), "mxfp8", Origin.FLAG, "checkpoint", Origin.CHECKPOINT),
    ("unknown-kept", manifest(head="int3"), "int3", Origin.FLAG, "checkpoint", Origin.CHECKPOINT),
    ("empty-is-absent", manifest(head="", verify=""), "checkpoint", Origin.CHECKPOINT,
     "checkpoint", Origin.CHECKPOINT),
    ("scope-all-leaves-heads", manifest(online="mxfp8", scope="all"), "checkpoint", Origin.CHECKPOINT,
     "checkpoint", Origin.CHECKPOINT),
    ("body-leaves-heads", manifest(body="mxfp8"), "checkpoint", Origin.CHECKPOINT, "checkpoint", Origin.CHECKPOINT),
    ("verify", manifest(verify="bf16"), "checkpoint", Origin.CHECKPOINT, "bf16", Origin.FLAG),
    ("no-draft", manifest(None, None, head="nvfp4"), NO_DRAFT, Origin.DEFAULT, "checkpoint", Origin.CHECKPOINT),
]


@pytest.mark.parametrize(
    ("made", "head", "head_origin", "verify", "verify_origin"), [row[1:] for row in HEADS],
    ids=[row[0] for row in HEADS],
)
def test_heads_have_their_own_precision(
    made: RebuildManifest, head: str | NoDraft, head_origin: Origin, verify: str, verify_origin: Origin
) -> None:
    report = {row.role: row for row in effective_precision(made)}

    assert effective_draft_head(made) == head
    assert effective_verify_head(made) == verify
    assert report[Role.DRAFT_HEAD].origin is head_origin
    assert report[Role.VERIFY_HEAD].origin is verify_origin


def test_reports_print_plain_words() -> None:
    words = [(row.role.value, row.text, row.origin.value) for row in effective_precision(RebuildManifest())]

    assert words == [
        ("target inputs", "checkpoint", "checkpoint"),
        ("draft body", "no draft", "default"),
        ("proposal head", "no draft", "default"),
        ("verification head", "checkpoint", "checkpoint"),
    ]
    assert CHECKPOINT == "checkpoint"
