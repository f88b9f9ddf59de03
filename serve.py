# SPDX-License-Identifier: Apache-2.0
"""Serve a trained model over HTTP: python serve.py --workdir=runs/tiny

It serves the OpenAI API at /v1, a page at /, /health and /metrics; see docs/serving.md. A language model completes
text, and answers conversations if it was trained on them or its tokenizer has a chat template. A recursive model solves
puzzles. It needs `make setup EXTRAS=serve`, runs on one device, and ends with SIGTERM or Ctrl-C, with status 0.
"""

from core import command_line

command_line.flags.DEFINE_string("host", "127.0.0.1", "address to listen at; others than loopback need a key")
command_line.flags.DEFINE_integer("port", 8000, "to listen at; 0: any free one", 0, 65535)
command_line.flags.DEFINE_string("api_key_file", "", "file with the key that clients send; or set TORUS_API_KEY")
command_line.flags.DEFINE_integer("rows", 8, "answers that are decoded together", 1, 4096)
command_line.flags.DEFINE_integer("max_length", 0, "tokens of a prompt with its answer; 0: model.max_length", 0)
command_line.flags.DEFINE_integer("max_waiting", 64, "answers that may wait for a row", 0, 1_000_000)
command_line.flags.DEFINE_integer("grace_seconds", 30, "for running requests after SIGTERM", 0, 86_400)
if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.READ, one_device=True)

import functools
from typing import NamedTuple

from configs.errors import ConfigError
from inference.batching import Batch
from inference.engine import Engine
from inference.prompts import can_chat
from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.chat.template import PlainFormat, Template
from input_pipeline.tokenization import AnyTokenizer
from parallelism.mesh import mesh_context
from puzzles import solving
from trained_run import TrainedRun, tokenizer_of

OF_TEXT = ("rows", "max_length")
NO_CHAT = "; no chat, because it was not trained on conversations and its tokenizer has no chat template"

try:
    from serving.app import make_app
    from serving.puzzles import PuzzleService
    from serving.server import Server, listen, read_key
    from serving.text import TextService
    from serving.worker import Worker
except ModuleNotFoundError as missing:
    raise ConfigError(f"serve.py needs the package {missing.name}: run `make setup EXTRAS=serve`") from None


def main(command: command_line.Command) -> None:
    """Load a model, compile its programs, and serve it until a signal."""
    flags, config = command_line.FLAGS, command.config
    key = read_key(flags.api_key_file, flags.host)
    check_lengths(flags, config)
    solves = config.train.objective == "recursive"
    texts = None if solves else texts_of(command.address, config)  # report errors before the slow restore
    with listen(flags.host, flags.port) as listener:
        trained = TrainedRun(command.address, config)
        print(trained.describe(), flush=True)
        name = str(command.address).rstrip("/").rpartition("/")[2]
        service = puzzle_service(name, trained, flags) if solves else text_service(name, trained, texts, flags)
        print(f"{name}: {', '.join(service.abilities)}{'' if solves or texts.form else NO_CHAT}", flush=True)
        Server(make_app(service, key), flags.grace_seconds).serve_on(listener)
        service.stop()


class Texts(NamedTuple):
    """The tokenizer of a run, and the format of its conversations, None if the model has seen none."""

    tokenizer: AnyTokenizer
    form: PlainFormat | Template | None


def texts_of(address, config) -> Texts:
    """Return the tokenizer of a run and the format of its conversations."""
    tokenizer = tokenizer_of(address, config)
    form = format_of_tokenizer(tokenizer, config.data.tokenizer) if can_chat(config, tokenizer) else None
    return Texts(tokenizer, form)


def text_service(name: str, trained: TrainedRun, texts: Texts, flags) -> TextService:
    """Return the service of a language model, with all programs compiled."""
    length = flags.max_length or trained.config.model.max_length

    def make_batch() -> Batch:
        engine = Engine(trained.run.graph, trained.params, length, trained.config.inference.cache_dtype)
        return Batch(engine, num_rows=flags.rows, vocab_size=texts.tokenizer.vocab_size)

    worker = Worker(make_batch, functools.partial(mesh_context, trained.run.mesh))
    return TextService(name, *texts, worker, flags.max_waiting)


def puzzle_service(name: str, trained: TrainedRun, flags) -> PuzzleService:
    """Return the service of a recursive model, compiled."""
    solve = functools.partial(solving.solve, trained.run.objective, trained.run.graph, trained.params)
    mesh = functools.partial(mesh_context, trained.run.mesh)
    return PuzzleService(name, trained.config, solve, mesh, flags.max_waiting)


def check_lengths(flags, config) -> None:
    """Raise ConfigError for flags that the model of a run does not allow."""
    longest = config.model.max_length
    if config.train.objective == "recursive" and (given := [name for name in OF_TEXT if flags[name].present]):
        raise ConfigError(f"--{given[0]}: a recursive model solves puzzles one at a time; omit the flag")
    if flags.max_length > longest:
        raise ConfigError(f"--max_length={flags.max_length} exceeds model.max_length={longest}; use at most {longest}")


if __name__ == "__main__":
    main(COMMAND)
