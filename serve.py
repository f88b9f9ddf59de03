# SPDX-License-Identifier: Apache-2.0
"""Serve a trained model over HTTP: python serve.py --workdir=runs/tiny

It serves the OpenAI API at /v1, a page at /, /health and /metrics; see docs/serving.md. A language model completes
text, and answers conversations if it was trained on them or its tokenizer has a chat template. A recursive model solves
puzzles. It needs `make setup EXTRAS=serve`, and ends with SIGTERM or Ctrl-C, with status 0.

A language model is decoded on all devices. A model larger than a host is served by all its hosts: start the command on
each, as for training; process 0 listens, and the others follow.
"""

from core import command_line

command_line.flags.DEFINE_string("host", "127.0.0.1", "address to listen at; others than loopback need a key")
command_line.flags.DEFINE_integer("port", 8000, "to listen at; 0: any free one", 0, 65535)
command_line.flags.DEFINE_string("api_key_file", "", "file with the key that clients send; or set TORUS_API_KEY")
command_line.flags.DEFINE_integer("rows", 8, "answers decoded together, or more until the mesh divides them", 1, 4096)
command_line.flags.DEFINE_integer("max_length", 0, "tokens of a prompt with its answer; 0: model.max_length", 0)
command_line.flags.DEFINE_integer("max_waiting", 64, "answers that may wait for a row", 0, 1_000_000)
command_line.flags.DEFINE_integer("grace_seconds", 30, "for running requests after SIGTERM", 0, 86_400)
if __name__ == "__main__":
    command_line.ending.ends_by_signal("stopped before the server was ready")
    COMMAND = command_line.parse(__doc__, use=lambda flags: command_line.READ, chooses_mesh=True)

import functools
import os
import pathlib
import socket
from typing import NamedTuple

import jax

from cluster import processes
from configs.base import MESH_AXES
from configs.errors import ConfigError
from core import decoding
from inference.batching import Batch
from inference.engine import Engine
from inference.prompts import can_chat
from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.chat.template import PlainFormat, Template
from input_pipeline.tokenization import AnyTokenizer
from parallelism.mesh import mesh_context
from puzzles import solving
from settings import validation
from settings.decoding import for_decoding
from trained_run import TrainedRun, tokenizer_of

OF_TEXT = ("rows", "max_length")  # flags
OF_BREADTH = ("trajectories", "noise", "random_start", "choice")  # keys of `inference` for several trajectories
NO_CHAT = "; no chat, because it was not trained on conversations and its tokenizer has no chat template"

try:
    from serving.app import make_app
    from serving.following import LeadingBatch, end_following, follow, ignore_signals
    from serving.puzzles import PuzzleService
    from serving.server import Server, listen, read_key
    from serving.text import TextService
    from serving.worker import Worker
except ModuleNotFoundError as missing:
    raise ConfigError(f"serve.py needs the package {missing.name}: run `make setup EXTRAS=serve`") from None


def main(command: command_line.Command) -> None:
    """Load a model, compile its programs, and serve it until a signal in process 0; follow it in the others."""
    flags, config = command_line.FLAGS, command.config
    command_line.ending.advise_less_memory("fewer --rows and a smaller --max_length take less memory")
    key = read_key(flags.api_key_file, flags.host)
    check_flags(command)
    solves = config.train.objective == "recursive"
    texts = None if solves else texts_of(command.address, config)  # report errors before the slow restore
    command_line.join(command, chooses_mesh=True)
    if solves:
        validation.validate(config, 1, command.loaded)
    else:
        config = config_to_decode(command)
    if processes.index() == 0:
        with listen(flags.host, flags.port) as listener:
            lead(command, config, texts, key, listener)
    else:
        ignore_signals()
        trained = TrainedRun(command.address, config, jax.devices())
        with mesh_context(trained.run.mesh):
            batch = make_batch(Batch, trained, texts.tokenizer, flags)
            batch.compile()
            follow(batch)
    processes.leave()


def lead(command: command_line.Command, config, texts: "Texts | None", key: str, listener: socket.socket) -> None:
    """Restore, compile, and serve at a listening socket."""
    flags = command_line.FLAGS
    trained = TrainedRun(command.address, config, jax.devices() if texts else None)
    print(trained.describe(), flush=True)
    name = name_of(command.address)
    service = text_service(name, trained, texts, flags) if texts else puzzle_service(name, trained, flags)
    print(f"{name}: {', '.join(service.abilities)}{NO_CHAT if texts and not texts.form else ''}", flush=True)
    app, has_failed = make_app(service, key), lambda: service.has_failed
    Server(app, flags.grace_seconds, has_failed, service.end_requests).serve_on(listener)
    service.stop()
    end_following()


def name_of(address: str | pathlib.Path) -> str:
    """Return the name of the model of a run: of its folder, also for "."; or of its folder in a bucket."""
    place = os.path.abspath(address) if isinstance(address, pathlib.Path) else address.rstrip("/")
    return place.rpartition("/")[2]


def config_to_decode(command: command_line.Command):
    """Return the configuration of a run on the mesh that it is decoded on.

    If axes of the mesh are typed, the rows of the batch are sharded over the rest of the devices.
    """
    config, num_devices, loaded = command.config, jax.device_count(), command.loaded
    is_typed = any(key.startswith("mesh.") for key in loaded.typed)
    if is_typed:
        untyped = [axis for axis in MESH_AXES if f"mesh.{axis}" not in loaded.typed]
        config.mesh.update({axis: -1 if axis == "data" else 1 for axis in untyped})
        validation.resolve_mesh(config, num_devices, loaded)
    config = for_decoding(config, num_devices, keep_mesh=is_typed)
    validation.validate(config, num_devices, loaded)
    return config


class Texts(NamedTuple):
    """The tokenizer of a run, and the format of its conversations, None if the model has seen none."""

    tokenizer: AnyTokenizer
    form: PlainFormat | Template | None


def texts_of(address, config) -> Texts:
    """Return the tokenizer of a run and the format of its conversations."""
    tokenizer = tokenizer_of(address, config)
    form = format_of_tokenizer(tokenizer, config.data.tokenizer) if can_chat(config, tokenizer) else None
    return Texts(tokenizer, form)


def make_batch(kind: type[Batch], trained: TrainedRun, tokenizer: AnyTokenizer, flags) -> Batch:
    """Return an empty batch."""
    length = flags.max_length or trained.config.model.max_length
    trained.params = decoding.placer(trained.run)(trained.params)  # and forget the weights as they were trained
    engine = Engine(trained.run.graph, trained.params, length, trained.config.inference.cache_dtype)
    return kind(engine, num_rows=flags.rows, vocab_size=tokenizer.vocab_size)


def text_service(name: str, trained: TrainedRun, texts: Texts, flags) -> TextService:
    """Return the service of a language model, with all programs compiled."""
    make = functools.partial(make_batch, LeadingBatch, trained, texts.tokenizer, flags)
    worker = Worker(make, functools.partial(mesh_context, trained.run.mesh))
    return TextService(name, *texts, trained.text_start, worker, flags.max_waiting)


def puzzle_service(name: str, trained: TrainedRun, flags) -> PuzzleService:
    """Return the service of a recursive model, compiled."""
    solve = functools.partial(solving.solve, trained.run.objective, trained.run.graph, trained.params)
    mesh = functools.partial(mesh_context, trained.run.mesh)
    if (trajectories := trained.config.inference.trajectories) > 1:
        print(f"Note: one trajectory answers, not inference.trajectories={trajectories}", flush=True)
    return PuzzleService(name, trained.config, solve, mesh, flags.max_waiting)


def check_flags(command: command_line.Command) -> None:
    """Raise ConfigError for flags that the model of a run does not allow."""
    flags, longest = command_line.FLAGS, command.config.model.max_length
    if command.config.train.objective == "recursive":
        if given := [name for name in OF_TEXT if flags[name].present]:
            raise ConfigError(f"--{given[0]}: a recursive model solves puzzles one at a time; omit the flag")
        if typed := [f"inference.{name}" for name in OF_BREADTH if f"inference.{name}" in command.loaded.typed]:
            raise ConfigError(f"{typed[0]}: one trajectory is served; leave it out, or give the puzzle to generate.py")
        if flags["topology"].present:
            raise ConfigError("--topology: a recursive model is served on one device; omit the flag")
        if command.group and command.group.count > 1:
            raise ConfigError(
                f"{command.group.source}: a recursive model is served by one process; start one, without these"
            )
    if flags.max_length == 1:
        raise ConfigError("--max_length=1 has no room for a prompt with an answer; use at least 2")
    if flags.max_length > longest:
        raise ConfigError(f"--max_length={flags.max_length} exceeds model.max_length={longest}; use at most {longest}")


if __name__ == "__main__":
    main(COMMAND)
