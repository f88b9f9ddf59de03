# SPDX-License-Identifier: Apache-2.0
"""Train a model: python train.py --config=configs/small.py --workdir=runs/mine [--topology=v4-32]

Takes up where the newest checkpoint in the workdir stands. With --evaluate_only it evaluates that checkpoint,
on all documents of other data where --config.data.path is given.
"""

import command_line

command_line.flags.DEFINE_bool("evaluate_only", False, "evaluate the newest checkpoint of the workdir, train nothing")
if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, stored=lambda flags: flags.evaluate_only)

import math
import pathlib
from collections.abc import Callable
from itertools import islice

import jax

import assembly
from configs import validation
from configs.loading import DATA_READ, flat
from input_pipeline import batches as pipeline
from input_pipeline import corpus as corpora
from parallelism import processes
from parallelism.mesh import mesh_context
from parallelism.placement import local_rows, place
from reasoning.sampling import continue_texts
from training import preflight, replicas, step_log
from training import workdir as workdirs
from training.checkpoints import Checkpoints
from training.display import Display
from training.evaluation import evaluate
from training.heartbeat import Heartbeat
from training.interruption import Interrupted, in_thread, interruption
from training.metrics import MetricsWriter
from training.step import every, is_finite
from training.watchdog import watchdog

SAMPLE_PROMPT = "def "
SAMPLE_TEMPERATURE = 0.7


def train(
    config, workdir: pathlib.Path, batches=None, *, bucket=None, topology=None, vocab_size_typed: bool = True
) -> None:
    """Run the one training loop up to `train.steps`, then evaluate and print what came of it.

    Args:
      config: validated, its mesh resolved.
      workdir: of metrics, checkpoints and logs; an earlier run in it is taken up.
      batches: iterator of dictionaries of int32 [global_batch, sequence_length] arrays, beginning with the first
        example not yet trained on; default: the corpus that `config.data` describes.
      bucket: of which `workdir` is the local copy; checkpoints go there.
      topology: hardware preset, for its peak.
      vocab_size_typed: whether a corpus too small for `model.vocab_size` is an error.

    Raises:
      Interrupted: SIGINT or SIGTERM came; the state is saved.
      NonFinite: the loss or gradient is not finite.
    """
    run = assembly.assemble(config)
    preflight.check_state_fits(run)
    corpus = prepare_corpus(config, vocab_size_typed) if batches is None else None
    hang_seconds = 0 if run.slow else config.train.hang_seconds
    send = send_to(bucket, workdir)
    with (
        workdirs.exclusive(workdir, is_copy=bucket is not None),
        watchdog(hang_seconds, processes.log_file(workdir)) as alive,
        Checkpoints(bucket.url if bucket else workdir, config.checkpoint.keep, on_save=send) as checkpoints,
    ):
        record = workdirs.check_resumable(checkpoints, flat(config), digest(corpus), workdir)
        corpus = corpus.go_on(record) if corpus and record else corpus
        start, last_step = set_steps(config, corpus, record)
        if record and start >= last_step and workdirs.show_summary(workdir):
            return
        if processes.index() == 0:
            workdirs.open_workdir(workdir, flat(config), corpus)
        send()
        try:
            run_to_the_end(config, workdir, checkpoints, record, corpus, batches, topology, alive)
        except (Interrupted, step_log.NonFinite):
            send()
            raise
        send()


def run_to_the_end(
    config, workdir: pathlib.Path, checkpoints: Checkpoints, record, corpus, batches, topology, alive
) -> None:
    """Take the run from `record`, or from nothing, to its last step and its summary; call `alive` now and then."""
    start, last_step = record["step"] if record else 0, config.train.steps
    first = processes.index() == 0
    display, heartbeat = Display(last_step, quiet=not first), Heartbeat(workdir)
    run = assembly.assemble(config, on_microbatch=display.microbatch)
    with (
        MetricsWriter(workdir, tensorboard=config.logging.tensorboard, first=first) as writer,
        display,
        interruption(alive) as signals,
        mesh_context(run.mesh),
    ):
        heartbeat.beat(start, "compiling")
        batches = training_batches(run, corpus, batches, record["examples"] if record else 0, last_step - start)
        state = restored(checkpoints, start, run) if record else run.init()
        replicas.check(state, run.mesh)
        train_step = run.compile()
        peak = preflight.peak_flops(topology, run.mesh.size)
        display.lines(preflight.report(run, train_step, last_step - start, peak))
        train_step = in_thread(train_step, signals) if run.slow and processes.count() == 1 else train_step
        log = step_log.StepLog(
            run, writer, display, workdir=workdir, peak_flops=peak[0], record=record, on_end=heartbeat.beat
        )
        save_every = 1 if run.slow else config.train.save_every
        for step in range(start + 1, last_step + 1):
            state, scalars = train_step(state, log.stopwatch.next(batches))
            log.add(step, scalars)
            stop = signals.agreed()
            if every(step, save_every) or step == last_step or stop:
                save(checkpoints, state, log, corpus, topology)
            if stop:
                heartbeat.beat(step, "stopped")
                raise Interrupted(step)
            if corpus and step < last_step and every(step, config.train.eval_every):
                log.flush()
                heartbeat.beat(step, "evaluating")
                heldout = evaluate_heldout(run, state, corpus, signals.agreed, config.evaluation.batches)
                log.evaluation(step, heldout)
        checkpoints.wait()
        signals.at_once = True
        if any(processes.gather("asked to stop", signals.requested)):  # after the last boundary
            raise Interrupted(last_step)
        heartbeat.beat(last_step, "closing")
        lines = close(run, state, corpus, log, checkpoints.address, signals.pass_on)
        if first:
            workdirs.write_summary(workdir, lines)
        heartbeat.beat(last_step, "finished")


def send_to(bucket, workdir: pathlib.Path) -> Callable[[], None]:
    """Bring what the run left in the bucket; return a function that copies there what is small of it."""
    if bucket is None:
        return lambda: None
    first = processes.index() == 0
    if first:
        bucket.fetch()
    return lambda: bucket.send(processes.log_file(workdir), first=first)


def restored(checkpoints: Checkpoints, step: int, run: assembly.Run):
    """Return the state of a checkpoint on the devices, read as `checkpoint.restore` says."""
    if run.config.checkpoint.restore == "broadcast":
        return checkpoints.restore_by_broadcast(step, run.abstract_state, run.mesh)
    return checkpoints.restore(step, run.abstract_state)


def prepare_corpus(config, vocab_size_typed: bool) -> corpora.Corpus:
    """Return the corpus that `config.data` describes, tokenised once and cached, the same on all hosts.

    Raises:
      ConfigError: a host has other data.
    """
    announce = corpora.say if processes.index() == 0 else lambda line: None
    corpus = corpora.prepare(
        config.data, vocab_size=config.model.vocab_size, vocab_size_typed=vocab_size_typed, announce=announce
    )
    processes.check_same({"digest": corpus.digest}, "their corpus")
    return corpus


def digest(corpus: corpora.Corpus | None) -> str:
    """Return what identifies the data of a run; batches from elsewhere have no name."""
    return corpus.digest if corpus else ""


def set_steps(config, corpus: corpora.Corpus | None, record: dict | None) -> tuple[int, int]:
    """Put what `train.tokens` or `train.epochs` come to into `train.steps`; return (steps done, last step)."""
    train = config.train
    start, done = (record["step"], record["examples"]) if record else (0, 0)
    if not train.steps:
        examples = train.tokens / train.sequence_length
        if train.epochs:
            examples = train.epochs * corpus.train.num_examples(train.sequence_length)
        train.steps = start + math.ceil(max(0, examples - done) / train.global_batch)
        train.tokens, train.epochs = 0, 0.0
    return start, train.steps


def training_batches(run: assembly.Run, corpus, batches, first_example: int, num_steps: int):
    """Return an iterator of batches on the devices, from the corpus, or from whole batches given from outside."""
    train, sharding = run.config.train, run.abstract_batch["tokens"].sharding
    rows = local_rows(sharding, train.global_batch)
    if batches is None:
        batches = pipeline.training_batches(
            corpus.train, seed=train.seed, sequence_length=train.sequence_length, global_batch=train.global_batch,
            rows=rows, first_example=first_example, num_steps=num_steps,
            readers=run.config.data.readers, prefetch=run.config.data.prefetch,
        )  # fmt: skip
    else:
        batches = ({name: array[rows] for name, array in batch.items()} for batch in islice(batches, num_steps))
    return place(batches, sharding, train.global_batch)


def evaluate_heldout(run: assembly.Run, state, corpus, stop=lambda: False, num_batches: int | None = None):
    """Return (nats per token, tokens) of the held-out documents; None where it was stopped.

    Args:
      stop: called before each batch, in all processes alike: whether to stop here.
      num_batches: of a global batch each, evenly spread; default: all documents.
    """
    sharding = run.abstract_batch["tokens"].sharding
    batches = pipeline.evaluation_batches(
        corpus.heldout, sequence_length=run.config.train.sequence_length, global_batch=run.eval_rows,
        rows=local_rows(sharding, run.eval_rows), num_batches=num_batches and num_batches * run.num_microbatches,
        readers=run.config.data.readers, prefetch=run.config.data.prefetch,
    )  # fmt: skip
    batches = place(batches, sharding, run.eval_rows)
    return evaluate(run, state.evaluated, batches, stop)


def save(checkpoints: Checkpoints, state, log: step_log.StepLog, corpus, topology) -> None:
    """Begin to write a checkpoint of a state whose loss and gradient were finite."""
    log.flush()
    if not is_finite(state):
        raise step_log.NonFinite(f"the parameters or moments after step {int(state.step)} are not finite; not saved")
    record = log.record() | {
        "step": int(state.step),
        "examples": int(state.examples),
        "config": flat(log.run.config),
        "corpus": digest(corpus),
        "mixture": corpus.train.record() if corpus else [],
        "topology": topology.name if topology else None,
    }
    checkpoints.save(int(state.step), state, record)
    log.stopwatch.skip()


def close(run: assembly.Run, state, corpus, log: step_log.StepLog, workdir: pathlib.Path | str, stop) -> list[str]:
    """Evaluate all held-out documents, draw a sample, and print and return the summary."""
    lines = [""]
    if corpus:
        log.display.phase("evaluating all held-out documents")
        loss, tokens = evaluate_heldout(run, state, corpus, stop)
        log.evaluation(int(state.step), (loss, tokens))
        lines += heldout_lines(loss, tokens, corpus)
    lines.append(f"speed: {log.average_tokens_per_second():,.0f} tokens/s over {log.total_tokens:,} tokens")
    lines.append(f"checkpoint: {workdir}/checkpoints/{int(state.step)}")
    if corpus and corpus.tokenizer and run.config.evaluation.sample_tokens:
        lines += sample_lines(run, state.evaluated, corpus.tokenizer)
        lines.append(f'next: .venv/bin/python generate.py --workdir={workdir} --prompt="class " --max_tokens=64')
    log.display.lines(lines)
    return lines


def heldout_lines(loss: float, tokens: int, corpus: corpora.Corpus) -> list[str]:
    """Return what the held-out loss comes to, in bits per byte too where there is text."""
    heldout = corpus.heldout
    lines = [f"held-out loss: {loss:.4f} nats a token, over {tokens:,} tokens of {heldout.num_documents:,} documents"]
    if corpus.gzip_bits_per_byte is not None:
        bits = loss * tokens / math.log(2) / heldout.num_bytes
        lines.append(f"held-out bits per byte: {bits:.2f}   gzip -9: {corpus.gzip_bits_per_byte:.2f}")
    return lines


def sample_lines(run: assembly.Run, params: dict, tokenizer) -> list[str]:
    """Return what the model writes after a short prompt."""
    room = run.config.model.max_length - len(tokenizer.encode(SAMPLE_PROMPT)) - 1
    text = continue_texts(
        run, params, tokenizer, [SAMPLE_PROMPT], max_tokens=min(run.config.evaluation.sample_tokens, room),
        temperature=SAMPLE_TEMPERATURE, seed=run.config.train.seed,
    )[0]  # fmt: skip
    lines = (SAMPLE_PROMPT + text).rstrip().split("\n")
    return [f"sample (temperature {SAMPLE_TEMPERATURE}):", *["  | " + line for line in lines]]


def evaluate_only(config, workdir: pathlib.Path | str, other_data: bool) -> None:
    """Print the loss of the newest checkpoint on what the run held out, or on all of `other_data`, which was typed."""
    if other_data:
        corpus = corpora.prepare_to_evaluate(config.data, vocab_size=config.model.vocab_size)
    else:
        corpus = prepare_corpus(config, vocab_size_typed=True)
    run = assembly.assemble(config)
    with Checkpoints(workdir) as checkpoints, mesh_context(run.mesh):
        step = checkpoints.newest_or_error()
        state = checkpoints.restore(step, run.abstract_state)
        loss, tokens = evaluate_heldout(run, state, corpus)
    if processes.index() == 0:
        print("\n".join([f"checkpoint: {workdir}/checkpoints/{step}", *heldout_lines(loss, tokens, corpus)]))


def main(command: command_line.Command) -> None:
    """Settle what only the devices know, say where we are, and train or evaluate."""
    config = command.config
    command_line.join(command)
    command_line.log_to(command.workdir)
    if command.num_devices is None:
        validation.validate(config, jax.device_count(), command.loaded)
    if command_line.FLAGS.evaluate_only:
        evaluate_only(config, command.address, any(command.loaded.typed.get(key) for key in DATA_READ))
    else:
        print("\n".join([*(command.banner() if processes.index() == 0 else []), *device_lines(config)]), flush=True)
        train(
            config, command.workdir, bucket=command.bucket, topology=command.loaded.topology,
            vocab_size_typed="model.vocab_size" in command.loaded.typed,
        )  # fmt: skip
    processes.leave()


def device_lines(config) -> list[str]:
    """Return what this process sees."""
    axes = [axis for axis in config.layout.axis_order.split(",") if axis != "dcn_data" or config.mesh[axis] > 1]
    return [
        f"Local devices: {jax.local_device_count()} ({jax.local_devices()[0].device_kind})",
        f"Global devices: {jax.device_count()}",
        f"Process index: {jax.process_index()}",
        f"Process count: {jax.process_count()}",
        "Mesh: " + " * ".join(f"{axis}={config.mesh[axis]}" for axis in axes),
    ]


if __name__ == "__main__":
    main(COMMAND)
