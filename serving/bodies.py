# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON body of a request."""

from typing import TypeVar

import pydantic
from starlette.requests import ClientDisconnect, Request

from configs.errors import shown
from serving.errors import ApiError, gone, of_validation
from serving.requests import FIELDS

MOST_BYTES = 8 << 20  # of a body
Schema = TypeVar("Schema", bound=pydantic.BaseModel)


async def read(request: Request, schema: type[Schema], model: str) -> Schema:
    """Return the body of a request for this model; ApiError if it is not what the schema describes.

    Only JSON is read: a page of another site has to ask before it sends JSON, and that is refused.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"the body has the type {shown(kind or 'nothing')}; send Content-Type: application/json")
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise ApiError(413, f"the body is larger than {MOST_BYTES:,} bytes")
    except ClientDisconnect:
        raise gone() from None
    try:
        given = schema.model_validate_json(bytes(body))
    except pydantic.ValidationError as error:
        raise of_validation(error, FIELDS) from None
    if given.model not in (None, model):
        raise ApiError(
            404, f"the model {shown(given.model)} is not served here; use {model}", param="model",
            code="model_not_found",
        )  # fmt: skip
    return given
