"""What a client is told when a request is refused: OpenAI's error form, with the parameter that is at fault.

    raise ApiError.bad_request("max_tokens must be at least 1", param="max_tokens")
"""

from __future__ import annotations

from typing import Any

from dflash_core.errors import DflashError, ImageError
from starlette.responses import JSONResponse

_PARAM_OF_CODE = {
    "CONTEXT_LENGTH": "max_tokens", "TOKEN_RANGE": "prompt", "PROMPT_EMPTY": "prompt", "KV_PAGES": "max_tokens",
    "CHAT_TEMPLATE": "messages", "NO_CHAT_TEMPLATE": "messages", "NO_TOKENIZER": "prompt",
}


class ApiError(Exception):
    """A refusal: HTTP status and the fields of OpenAI's error object."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
                 code: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers or {}

    @classmethod
    def bad_request(cls, message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
        return cls(400, message, param=param, code=code)

    @classmethod
    def of(cls, error: DflashError, param: str = "messages") -> ApiError:
        """A request that the core cannot run, or a step that failed.

        Args:
            param: where images are, if one is at fault.
        """
        if isinstance(error, ImageError):
            return cls(400, str(error).replace("\n", ";"), param=param, code=error.code.lower())
        if error.code == "REQUEST":
            return cls(400, str(error).replace("\n", ";"), param=error.where, code="invalid_value")
        if error.code in _PARAM_OF_CODE:
            code = "context_length_exceeded" if error.code == "CONTEXT_LENGTH" else error.code.lower()
            return cls(400, str(error).replace("\n", ";"), param=_PARAM_OF_CODE[error.code], code=code)
        return cls(500, str(error).replace("\n", ";"), kind="server_error", code=error.code.lower())

    def document(self) -> dict[str, Any]:
        """The body of the response, or of an event in a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.document(), self.status, self.headers)
