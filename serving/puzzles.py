# SPDX-License-Identifier: Apache-2.0
"""The endpoint of a recursive model: a puzzle, and its answer after each supervision step."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.errors import ConfigError
from objectives import breadth
from puzzles import puzzle_file, solving
from serving.bodies import read
from serving.errors import ApiError, ending
from serving.metrics import Metrics
from serving.requests import PuzzleRequest
from serving.text import unless_disconnected

# (tokens, supervision steps, whether the client still waits) -> answers
Solve = Callable[[np.ndarray, int, Callable[[], bool]], Sequence[solving.Answer]]


class PuzzleService:
    """Solves puzzles for clients, one at a time in a thread of its own.

    Attributes:
      abilities: what the model can be asked, for /v1/models.
      in_flight: puzzles that are being solved or wait.
    """

    abilities = ("puzzles",)
    has_failed = False  # a puzzle that fails ends its own request alone

    def __init__(self, name: str, config, solve: Solve, mesh: Callable[[], AbstractContextManager], max_waiting: int):
        """Serve the run of this `config` under a name; return when the model is compiled.

        Args:
          solve: called in the thread, in the mesh.
          mesh: returns the context of the mesh.
        """
        self.name, self.max_length, self.in_flight = name, config.model.max_length, 0
        self._config, self._solve, self._mesh, self._max_waiting = config, solve, mesh, max_waiting
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "solve")
        self._stopping = threading.Event()
        self._thread.submit(self._answers, np.zeros(self.max_length, np.int32), 1, threading.Event()).result()
        self.metrics = Metrics({"torus_requests_in_flight": ("puzzles in work or waiting", lambda: self.in_flight)})

    def routes(self) -> list[Route]:
        """Return the endpoint."""
        return [Route("/v1/puzzles", self.puzzle, methods=["POST"])]

    def end_requests(self) -> None:
        """End all requests with an error after the current step, because the server ends."""
        self._stopping.set()

    def stop(self) -> None:
        """End the thread after the current step of its puzzle."""
        self.end_requests()
        self._thread.shutdown(cancel_futures=True)

    async def puzzle(self, request: Request) -> Response:
        """Solve a puzzle."""
        started, given = time.monotonic(), await read(request, PuzzleRequest, self.name)
        try:
            puzzle = puzzle_file.parse(given.puzzle.splitlines(), "puzzle")
            solving.check_fits(puzzle, self._config)
        except ConfigError as error:
            raise ApiError(400, str(error), param="puzzle") from None
        if self.in_flight > self._max_waiting:
            raise ApiError(
                429, f"{self.in_flight} puzzles are in work or wait already; try again later", code="busy",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        steps = given.supervision_steps or breadth.of_config(self._config).steps
        self.in_flight, gone = self.in_flight + 1, threading.Event()
        try:
            solved = self._thread.submit(self._answers, puzzle.tokens, steps, gone)
            answers = await unless_disconnected(request, asyncio.wrap_future(solved))
        finally:
            gone.set()
            self.in_flight -= 1
        self.metrics.duration.observe(time.monotonic() - started)
        return JSONResponse({"object": "puzzle.answer", "model": self.name} | described(puzzle, answers))

    def _answers(self, tokens: np.ndarray, steps: int, gone: threading.Event) -> Sequence[solving.Answer]:
        def is_wanted() -> bool:
            return not (gone.is_set() or self._stopping.is_set())

        with self._mesh():
            answers = self._solve(tokens, steps, is_wanted) if is_wanted() else []
        if self._stopping.is_set():
            raise ending()
        return answers


def described(puzzle: puzzle_file.Puzzle, answers: Sequence[solving.Answer]) -> dict:
    """Return a puzzle and its answers as JSON: rows of characters, "." for an empty cell of a Sudoku."""
    steps, shape = [], puzzle.tokens.shape
    for answer in answers:
        cells = answer.cells.reshape(shape)
        wrong = np.argwhere(solving.mistakes(puzzle, cells)).tolist()
        steps.append({"rows": rows(puzzle.kind, cells), "halt": answer.halt, "wrong": wrong})
    last = answers[-1].cells.reshape(shape)
    return {
        "kind": puzzle.kind, "given": rows(puzzle.kind, puzzle.tokens), "steps": steps,
        "box": list(puzzle_file.BOXES[len(last)]) if puzzle.kind == "sudoku" else None,
        "solved": not solving.problem(puzzle, last), "verdict": solving.verdict(puzzle, last),
    }  # fmt: skip


def rows(kind: str, cells: np.ndarray) -> list[str]:
    """Return the characters of each row."""
    if kind == "maze":
        return puzzle_file.board_text(kind, cells).split("\n")
    return ["".join(puzzle_file.digit(token, len(cells)) for token in row) for row in cells.tolist()]
