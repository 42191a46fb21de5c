"""The server's own OpenAPI description, made from the bodies that it really reads."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from runtime.serve.protocol import ChatBody, CompletionBody

_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"},
                       "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}},
}
_USAGE = {
    "type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}


def describe(version: str) -> dict[str, Any]:
    """The description, OpenAPI 3.1."""
    _, bodies = models_json_schema([(CompletionBody, "validation"), (ChatBody, "validation")],
                                   ref_template="#/components/schemas/{model}")
    schemas = {**bodies["$defs"], "Error": _ERROR, "Completion": _answer("text_completion"),
               "ChatCompletion": _answer("chat.completion")}
    return {
        "openapi": "3.1.0", "info": {"title": "dflash debug-serve", "version": version},
        "paths": {
            "/v1/models": {"get": _get("the core that is served", {"type": "object"}, 401)},
            "/v1/models/{model}": {"get": {**_get("one model", {"type": "object"}, 401, 404), "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]}},
            "/v1/completions": {"post": _post("CompletionBody", "Completion")},
            "/v1/chat/completions": {"post": _post("ChatBody", "ChatCompletion")},
            "/health": {"get": _get("ready", {"type": "object"}, 503)},
            "/startupz": {"get": _get("how far the start is", {"type": "object"})},
            "/server_info": {"get": _get("core, precisions and graphs", {"type": "object"}, 401, 503)},
            "/metrics": {"get": {"summary": "Prometheus metrics", "responses": {
                "200": {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}},
                "503": _refused()}}},
        },
        "components": {"schemas": schemas},
    }


def _answer(kind: str) -> dict[str, Any]:
    return {
        "type": "object", "required": ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"],
        "properties": {"id": {"type": "string"}, "object": {"const": kind}, "created": {"type": "integer"},
                       "model": {"type": "string"}, "choices": {"type": "array", "minItems": 1, "maxItems": 1},
                       "usage": _USAGE, "system_fingerprint": {"type": "string"}}}


def _get(summary: str, schema: dict[str, Any], *refusals: int) -> dict[str, Any]:
    return {"summary": summary, "responses": {
        "200": {"description": summary, "content": {"application/json": {"schema": schema}}},
        **{str(status): _refused() for status in refusals}}}


def _post(body: str, answer: str) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}},
        "responses": {
            "200": {"description": "the answer, whole or as server-sent events", "content": {
                "application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}},
                "text/event-stream": {"schema": {"type": "string"}}}},
            **{str(status): _refused() for status in (400, 401, 404, 408, 413, 415, 429, 500, 503)}}}


def _refused() -> dict[str, Any]:
    return {"description": "refused", "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
