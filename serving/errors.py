# SPDX-License-Identifier: Apache-2.0
"""Errors of the API: {"error": {"message", "type", "param", "code"}} with a status."""

from collections.abc import Collection, Mapping

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from configs.errors import did_you_mean, shown, similar
from files.json_reader import rule_of

ENDING = "ending"  # the code of a request that goes on when the server ends
NOT_SUPPORTED = "not_supported"  # a parameter of the API that this server does not have
OF_SEVERAL_TYPES = {  # of these parameters, pydantic's message would describe only one type
    "prompt": "should be a string, up to 128 strings, token ids, or up to 128 lists of token ids",
    "stop": "should be a string or up to 16 strings, of 1 to 1,024 characters each",
    "content": 'should be a string or a list of {"type": "text", "text": "..."}',
    "logit_bias": "should give up to 1,024 token ids a number from -100 to 100",
}


class ApiError(Exception):
    """A request that is not answered; the message is one line that says what would work."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def content(self) -> dict:
        """Return the JSON of the API."""
        kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        error = {
            "message": str(self), "type": kind.get(self.status, "invalid_request_error"), "param": self.param,
            "code": self.code,
        }  # fmt: skip
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the answer of the API."""
        return JSONResponse(self.content(), self.status, self.headers)


def of_validation(error: pydantic.ValidationError, fields: Collection[str]) -> ApiError:
    """Return the first error of a request's JSON; `fields` are the names that an object of it may have."""
    first = error.errors(include_url=False)[0]
    kind, name = first["type"], _name(first["loc"], fields)
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if kind == "extra_forbidden":
        wrong = str(first["loc"][-1])
        suggestion = " of this endpoint" if wrong in fields else did_you_mean(similar(wrong, fields))
        return ApiError(
            400, f"{shown(wrong)} is not a parameter{suggestion}", param=shown(wrong), code="unknown_parameter"
        )
    if kind == "missing":
        return ApiError(400, f"{name} is missing; the request needs it", param=name, code="missing_parameter")
    if kind == NOT_SUPPORTED:
        return ApiError(400, first["msg"], param=first["ctx"]["name"], code=kind)
    rule = OF_SEVERAL_TYPES.get(name.rpartition(".")[2]) or rule_of(first)
    message = f"{name or 'the body'} {rule}, not {shown(repr(first['input']))}"
    return ApiError(400, message, param=name or None, code="invalid_value")


def gone() -> ApiError:
    """Return the error of a request whose client has disconnected."""
    return ApiError(499, "the client has disconnected")


def ending() -> ApiError:
    """Return the error of a request that did not finish before the server ends."""
    return ApiError(503, "the server ends; ask again", code=ENDING)


def _name(place: tuple[int | str, ...], fields: Collection[str]) -> str:
    """Return a place in the JSON as messages[0].content, without the names of types."""
    words = [
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in place
        if isinstance(part, int) or part in fields
    ]
    return "".join(words).removeprefix(".")


async def answer_api_error(request: Request, error: ApiError) -> JSONResponse:
    """Answer with an error of ours."""
    return error.response()


async def answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Answer a path that does not exist, or one that is asked with another method."""
    asked = f"{request.method} {shown(request.url.path)}"
    if error.status_code == 404:
        paths = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
        message = f"{asked} is not served here; there are {paths}"
    elif error.status_code == 405:
        message = f"{asked} is not possible; use {error.headers['Allow']}"
    else:
        message = f"{asked}: {error.detail}"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def answer_failure(request: Request, error: Exception) -> JSONResponse:
    """Answer after an error in the server itself, which its log describes."""
    return ApiError(500, "the server failed; its log has the reason").response()
