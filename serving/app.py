# SPDX-License-Identifier: Apache-2.0
"""The application: endpoints of a service, the page, health and metrics, behind a key or for this machine alone."""

import hmac
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.errors import ApiError, answer_api_error, answer_failure, answer_http_error
from serving.metrics import Metrics
from serving.page import page

OPEN_PATHS = ("/", "/health")  # need no key: the page asks for it
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class Service(Protocol):
    """What is served.

    Attributes:
      name: of the model.
      abilities: completions, chat, puzzles.
      max_length: tokens of a prompt with its answer.
      has_failed: whether no request can be answered any more.
    """

    name: str
    abilities: Sequence[str]
    max_length: int
    has_failed: bool
    metrics: Metrics

    def routes(self) -> list[Route]:
        """Return the endpoints."""


def make_app(service: Service, key: str) -> ASGIApp:
    """Return the application; without a key it answers only requests to names of this machine."""
    model = {
        "id": service.name, "object": "model", "created": int(time.time()), "owned_by": "torus",
        "abilities": list(service.abilities), "max_model_len": service.max_length,
    }  # fmt: skip
    document, headers = page()

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != service.name:
            raise ApiError(404, f"there is only the model {service.name}", code="model_not_found")
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def root(request: Request) -> Response:
        return Response(document, media_type="text/html", headers=headers)

    routes = [
        Route("/", root), Route("/health", health), Route("/metrics", metrics), Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model), *service.routes(),
    ]  # fmt: skip
    guard = Middleware(RequireKey, key=key) if key else Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)
    answers = Starlette(
        routes=routes,
        middleware=[guard],
        exception_handlers={
            ApiError: answer_api_error, HTTPException: answer_http_error, Exception: answer_failure
        },
    )  # fmt: skip
    return CountRequests(answers, service.metrics, {route.path for route in routes})


class RequireKey:
    """Refuses requests without the key."""

    def __init__(self, app, key: str):
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on if it has the key, or needs none."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        what = "the key is wrong" if given else "the request has no key"
        error = ApiError(
            401, f"{what}; send the header Authorization: Bearer KEY", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
        await error.response()(scope, receive, send)


class CountRequests:
    """Counts answers by path and status; all paths that are not known count as one.

    It is outside of Starlette, which answers an unexpected error outside of all middleware.
    """

    def __init__(self, app, metrics: Metrics, paths: Collection[str]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on, and count it when its answer begins."""

        async def counted(message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
