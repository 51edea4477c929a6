"""Errors as clients of /v1/messages expect them."""

from __future__ import annotations

import orjson

from gateway.openai.errors import ApiError
from gateway.openai.logprobs import Json

PREFIX = "/v1/messages"
"""Paths whose clients expect these errors."""

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesError(ApiError):
    """An error with the other envelope."""

    @classmethod
    def of(cls, error: ApiError) -> MessagesError:
        """The same error."""
        return cls(**vars(error))

    def event(self) -> Json:
        """The error as an object, which is an event of a stream as well."""
        kind = _TYPE_OF_STATUS.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "api_error"
        return {"type": "error", "error": {**self.fields(), "type": kind}}

    def envelope(self) -> bytes:
        """The JSON body; parameter and code are there as well."""
        return orjson.dumps(self.event())


def in_style_of(path: str, error: ApiError) -> ApiError:
    """The error as clients of a path expect it."""
    return MessagesError.of(error) if path.startswith(PREFIX) else error
