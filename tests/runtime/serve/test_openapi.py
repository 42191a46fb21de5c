"""schemathesis reads the server's own description and finds no request that breaks it."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from runtime.serve.openapi import describe
from tests.served_core import Server

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
schema = schemathesis.openapi.from_dict(describe("0"))


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(case: schemathesis.Case, server: Server) -> None:
    response = case.call(base_url=server.url, timeout=30)

    case.validate_response(response, checks=CHECKS)


def test_description_is_served_as_it_is(server: Server) -> None:
    with server.http() as http:
        served = http.get("/openapi.json").json()

    assert served["paths"].keys() == describe("0")["paths"].keys()
