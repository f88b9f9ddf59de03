# SPDX-License-Identifier: Apache-2.0
"""Train a model: python train.py --config=configs/small.py --workdir=runs/mine [--topology=v4-32]

Takes up where the newest good checkpoint in the workdir stands. With --evaluate_only it evaluates that checkpoint,
on all documents of other data where --config.data.path is given.
"""

import command_line

flags = command_line.flags
flags.DEFINE_bool("evaluate_only", False, "evaluate the newest checkpoint of the workdir, train nothing")
flags.DEFINE_bool("verify_checkpoints", False, "list the workdir's checkpoints, each with a verdict; train nothing")
flags.DEFINE_integer("explain_step", None, "print which documents a step of the workdir's run trained on", 1)
flags.DEFINE_string("faults", "", "strike on purpose, see training/faults.py: kill:1@300,nan@550,...")


def reads_only(parsed) -> bool:
    """Whether a run is looked at and not trained."""
    return parsed.evaluate_only or parsed.verify_checkpoints or parsed.explain_step is not None


if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, stored=reads_only)

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import jax

import assembly
import inspection
from configs import validation
from configs.loading import DATA_READ, flat
from input_pipeline import batches as pipeline
from input_pipeline import corpus as corpora
from input_pipeline import ledger
from input_pipeline.errors import DataError
from parallelism import processes
from parallelism.mesh import mesh_context
from parallelism.placement import local_rows, place
from reasoning.sampling import continue_texts
from training import lease, preflight, replicas, step_log
from training import workdir as workdirs
from training.checkpoints import Checkpoints, Damaged
from training.clock import PARTS, Clock
from training.display import Display
from training.evaluation import evaluate
from training.faults import Fault, Faults, parse_faults, spoiled
from training.goodput import Goodput
from training.interruption import Interrupted, Interruption, in_thread, interruption
from training.maintenance import maintenance_notices
from training.metrics import MetricsWriter
from training.recheck import twice
from training.retention import Retention
from training.step import every, is_finite
from training.step_log import NonFinite
from training.watch import Heartbeat, watchdog

SAMPLE_PROMPT = "def "
SAMPLE_TEMPERATURE = 0.7


def train(
    config, workdir: pathlib.Path, batches=None, *, bucket=None, topology=None, vocab_size_typed: bool = True,
    faults: Sequence[Fault] = (), started: float | None = None,
) -> None:  # fmt: skip
    """Run the one training loop up to `train.steps`, then evaluate and print what came of it.

    Args:
      config: validated, its mesh resolved.
      workdir: of metrics, checkpoints and logs; an earlier run in it is taken up.
      batches: iterator of dictionaries of int32 [global_batch, sequence_length] arrays, beginning with the first
        example not yet trained on; default: the corpus that `config.data` describes.
      bucket: of which `workdir` is the local copy; checkpoints are copied there.
      topology: hardware preset, for its peak.
      vocab_size_typed: whether a corpus too small for `model.vocab_size` is an error.
      faults: to strike on purpose.
      started: time.monotonic() when this process began; default: now.

    Raises:
      Interrupted: SIGINT or SIGTERM came; the state is saved.
      NonFinite: the run diverged, and going back did not help.
      SaveFailed: the last state could not be saved.
    """
    clock = Clock(time.monotonic() if started is None else started)
    run = assembly.assemble(config)
    preflight.check_state_fits(run)
    corpus = prepare_corpus(config, vocab_size_typed) if batches is None else None
    staging = config.checkpoint.staging or (bucket and bucket.folder / "staging")
    with (
        workdirs.exclusive(workdir, is_copy=bucket is not None),
        lease.held(bucket and bucket.url),
        Checkpoints(bucket.url if bucket else workdir, retention(config), staging=staging) as checkpoints,
    ):
        send = send_to(bucket, workdir)
        checkpoints.on_save = send
        record = workdirs.check_resumable(checkpoints, flat(config), digest(corpus), workdir)
        corpus = corpus.go_on(record) if corpus and record else corpus
        start, last_step = set_steps(config, corpus, record)
        if record and start >= last_step and workdirs.show_summary(workdir):
            return
        if processes.index() == 0:
            workdirs.open_workdir(workdir, flat(config), corpus)
        send()
        try:
            run_to_the_end(config, workdir, checkpoints, record, corpus, batches, topology, clock, faults)
        except (Interrupted, NonFinite):
            with contextlib.suppress(OSError):  # the bucket does not answer; what ends the run is told
                send()
            raise
        send()


def retention(config) -> Retention:
    """Return which checkpoints are kept."""
    return Retention(config.checkpoint.keep, config.checkpoint.keep_every, config.checkpoint.keep_best)


@dataclasses.dataclass
class Job:
    """What a process has at hand while it trains."""

    run: assembly.Run
    train_step: Callable
    workdir: pathlib.Path
    checkpoints: Checkpoints
    corpus: corpora.Corpus | None
    batches: Iterator | None
    topology: object
    clock: Clock
    log: step_log.StepLog
    signals: Interruption
    roll_backs: int  # of the run
    sections: list = dataclasses.field(default_factory=list)  # of the ledger, not written yet

    @property
    def config(self):
        """The run's."""
        return self.run.config

    def evaluates(self, step: int) -> bool:
        """Whether held-out documents are evaluated after a step; after the last one they all are, in the end."""
        return self.corpus is not None and step < self.config.train.steps and every(step, self.config.train.eval_every)


def run_to_the_end(
    config, workdir: pathlib.Path, checkpoints: Checkpoints, record, corpus, batches, topology, clock, faults
) -> None:
    """Take the run from `record`, or from nothing, to its last step and its summary."""
    last_step, first = config.train.steps, processes.index() == 0
    goodput = Goodput(clock, workdir / "workers" / "0.json", record and record["goodput"])
    display = Display(last_step, quiet=not first)
    run = assembly.assemble(config, on_microbatch=display.microbatch)
    faults = Faults(faults, workdir, clock)
    hang_seconds = 0 if run.slow else config.train.hang_seconds
    with (
        MetricsWriter(workdir, tensorboard=config.logging.tensorboard, first=first) as writer,
        display,
        watchdog(clock, hang_seconds, processes.log_file(workdir)),
        interruption() as signals,
        maintenance_notices(signals.ask),
        mesh_context(run.mesh),
    ):
        clock.enter("compile", record["step"] if record else 0)
        compiled = run.compile()
        peak = preflight.peak_flops(topology, run.mesh.size)
        display.lines(preflight.report(run, compiled, last_step - clock.step, peak))
        train_step = faults.wrapped(compiled, lambda: assembly.assemble(config, wrap_gradient=spoiled).compile())
        train_step = in_thread(train_step, signals) if run.slow and processes.count() == 1 else train_step
        log = step_log.StepLog(run, writer, display, goodput=goodput, peak_flops=peak[0], record=record)
        for early in checkpoints.told:
            log.event("", **early)
        checkpoints.tell, checkpoints.losses = log.event, losses_of(record)
        roll_backs = processes.shared("roll backs", lambda: ledger.roll_backs(workdir))
        job = Job(run, train_step, workdir, checkpoints, corpus, batches, topology, clock, log, signals, roll_backs)
        with Heartbeat(
            clock, workdir, step=lambda: log.last_step, seconds=goodput.record,
            tell=lambda text, figures: log.event(text, "blame", **figures),
        ):  # fmt: skip
            try:
                finish(job, train_to_the_end(job, record))
            finally:
                log.account()


def train_to_the_end(job: Job, record: dict | None):
    """Return the state after the last step; a run that diverges goes back and leaves out what it diverged on."""
    while True:
        try:
            return train_from(job, record)
        except step_log.Diverged as trouble:
            record = go_back(job, trouble, record)


def train_from(job: Job, record: dict | None):
    """Train from a checkpoint, or from nothing, to the last step; return the state."""
    train, clock, run = job.config.train, job.clock, job.run
    start, last_step = record["step"] if record else 0, train.steps
    clock.enter("start_up", start)
    keep_ledger(job, start, record["examples"] if record else 0)
    batches = training_batches(job, record["examples"] if record else 0, last_step - start)
    state = restored(job.checkpoints, start, run) if record else run.init()
    replicas.check(state, run.mesh)
    job.checkpoints.begun = start if record else None
    if start and job.evaluates(start) and start not in job.checkpoints.losses:  # due when the run was stopped
        evaluate_or_stop(job, state, start)
    save_every = 1 if run.slow else train.save_every
    job.log.stopwatch.skip()
    for step in range(start + 1, last_step + 1):
        clock.enter("data", step)
        batch = job.log.stopwatch.next(batches)
        if jax.default_backend() == "cpu":  # whose devices take work only when they are done with the last
            clock.enter("wait")
            job.log.flush()
        clock.enter("step")
        recheck_now = every(step, train.recheck_every)
        state, scalars = twice(job.train_step, state, batch, run.mesh) if recheck_now else job.train_step(state, batch)
        clock.enter("wait")
        job.log.add(step, scalars)
        stop = job.signals.agreed()
        if stop or step == last_step or every(step, save_every) or job.checkpoints.due_again(step, save_every):
            save(job, state, step, ends=stop or step == last_step)
        if stop:
            raise Interrupted(step)
        if job.evaluates(step):
            evaluate_or_stop(job, state, step)
    return state


def go_back(job: Job, trouble: step_log.Diverged, record: dict | None) -> dict | None:
    """Return the record of the checkpoint to go back to, None for the beginning, having left out the bad batches.

    Raises:
      NonFinite: it was done too often, or the batches are from elsewhere and come but once.
    """
    start, examples = (record["step"], record["examples"]) if record else (0, 0)
    rows = job.config.train.global_batch
    # What was skipped before a restart has been used up; today's batch size says nothing of it.
    first, last = (examples + max(0, step - start - 1) * rows for step in (trouble.first_step, trouble.last_step + 1))
    if job.roll_backs >= job.config.train.roll_backs or not job.corpus:
        raise NonFinite(
            f"{trouble} at step {trouble.last_step}, after going back {job.roll_backs} times; nothing bad was saved; "
            f"{keep_bad_documents(job, trouble)}lower optimizer.learning_rate in another --workdir"
        )
    job.roll_backs += 1
    job.checkpoints.wait()
    step = job.checkpoints.newest()
    record = job.checkpoints.record(step) if step is not None else None
    first = max(first, record["examples"] if record else 0)  # a checkpoint may lie among the steps that were skipped
    job.corpus = dataclasses.replace(job.corpus, train=job.corpus.train.skip(first, last))
    job.checkpoints.losses = losses_of(record)
    job.log.go_on(record)
    job.log.goodput.lost_since(record["goodput"]["parts"] if record else dict.fromkeys(PARTS, 0.0))
    job.log.event(
        f"{trouble}; back to step {step or 0}, leaving out {last - first} examples up to step {trouble.last_step}'s",
        "roll_back", step or 0, first_step=trouble.first_step, last_step=trouble.last_step,
    )  # fmt: skip
    return record


def keep_bad_documents(job: Job, trouble: step_log.Diverged) -> str:
    """Write down what the bad batches were made of; return where, as a part of a sentence."""
    if not job.corpus:
        return ""
    path = job.workdir / "bad_documents.txt"
    try:
        if processes.index() == 0:
            lines = inspection.documents_of(job.config, job.workdir, range(trouble.first_step, trouble.last_step + 1))
            workdirs.write_atomically(path, "\n".join(lines).encode())
    except (OSError, DataError) as error:
        return f"the documents of the bad batches could not be written down ({error}); "
    return f"the documents of the bad batches are in {path}: mend them, or "


def finish(job: Job, state) -> None:
    """Evaluate, draw a sample and keep the summary; all is saved."""
    job.signals.at_once = True
    if any(processes.gather("asked to stop", job.signals.requested)):  # after the last boundary
        raise Interrupted(job.config.train.steps)
    lines = close(job, state)
    if processes.index() == 0:
        workdirs.write_summary(job.workdir, lines)


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


def keep_ledger(job: Job, step: int, examples: int) -> None:
    """Write down how the steps from here on map to examples."""
    if job.corpus and processes.index() == 0:
        train = job.config.train
        section = ledger.new_section(
            job.corpus, step=step, examples=examples, global_batch=train.global_batch,
            sequence_length=train.sequence_length, seed=train.seed,
        )  # fmt: skip
        job.sections.append(section | {"roll_backs": job.roll_backs})
        write_ledger(job, may_wait=job.roll_backs > 0)


def write_ledger(job: Job, *, may_wait: bool) -> None:
    """Write down the sections that are not yet; where they `may_wait`, a disk without room does not end the run."""
    try:
        while job.sections:
            ledger.append(job.workdir, job.sections[0])
            job.sections.pop(0)
    except DataError as error:
        if not may_wait:
            raise
        job.log.event(str(error), "ledger_waits")


def training_batches(job: Job, first_example: int, num_steps: int):
    """Return an iterator of batches on the devices, from the corpus, or from whole batches given from outside."""
    train, data, sharding = job.config.train, job.config.data, job.run.abstract_batch["tokens"].sharding
    rows = local_rows(sharding, train.global_batch)
    if job.corpus:
        batches = pipeline.training_batches(
            job.corpus.train, seed=train.seed, sequence_length=train.sequence_length, global_batch=train.global_batch,
            rows=rows, first_example=first_example, num_steps=num_steps, readers=data.readers, prefetch=data.prefetch,
        )  # fmt: skip
    else:
        whole = islice(job.batches, num_steps)
        batches = ({name: array[rows] for name, array in of_all.items()} for of_all in checked(whole, job.run))
    return place(batches, sharding, train.global_batch)


def checked(batches: Iterator[dict], run: assembly.Run) -> Iterator[dict]:
    """Yield batches, all of the shapes that the step is compiled for, so that it never is again.

    Raises:
      ValueError: one is not; names the array, what it is and what it should be.
    """
    wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in run.abstract_batch.items()}
    for number, batch in enumerate(batches, start=1):
        found = {name: (array.shape, array.dtype) for name, array in batch.items()}
        for name in wanted.keys() | found.keys():
            if found.get(name) != wanted.get(name):
                texts = [f"{of[name][1]}{list(of[name][0])}" if name in of else "missing" for of in (found, wanted)]
                raise ValueError(f"batch {number} given to train(): {name} is {texts[0]} and should be {texts[1]}")
        yield batch


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


def save(job: Job, state, step: int, *, ends: bool) -> None:
    """Begin to write a checkpoint of a state that is finite; where the run `ends`, return when it is written.

    Raises:
      Diverged: the state is not finite.
      SaveFailed: the run ends, and it could not be written.
    """
    job.log.flush()
    if not is_finite(state):  # in which a process may wait for another, so that it is no part of the phase
        raise step_log.Diverged(f"the parameters or moments after step {step} are not finite", step, step)
    with job.clock.within("save"):
        record = job.log.record() | {
            "step": step,
            "examples": int(state.examples),
            "config": flat(job.config),
            "corpus": digest(job.corpus),
            "mixture": job.corpus.train.record() if job.corpus else [],
            "skips": job.corpus.train.skips if job.corpus else [],
            "losses": job.checkpoints.losses,
            "topology": job.topology.name if job.topology else None,
        }
        keep_what_is_needed(job)
        write = job.checkpoints.save_and_wait if ends else job.checkpoints.save
        write(step, state, record)
    job.log.stopwatch.skip()


def keep_what_is_needed(job: Job) -> None:
    """Write again what the checkpoint is useless without, where the folder was emptied under the run."""
    if processes.index() == 0:
        write_ledger(job, may_wait=True)
        if not (job.workdir / "config.json").exists():
            with contextlib.suppress(OSError):  # no room: the save will say so
                job.workdir.mkdir(parents=True, exist_ok=True)
                workdirs.open_workdir(job.workdir, flat(job.config), job.corpus)


def losses_of(record: dict | None) -> dict[int, float]:
    """Return the held-out losses of the checkpoints before, by step."""
    return {int(step): loss for step, loss in record["losses"].items()} if record else {}


def evaluate_now(job: Job, state, step: int, num_batches: int | None, stop: Callable[[], bool]):
    """Evaluate, write and return (nats per token, tokens); None where it was stopped."""

    def is_stopped() -> bool:
        job.clock.enter("evaluation")  # another batch of it
        return stop()

    with job.clock.within("evaluation"):
        job.log.flush()
        result = evaluate_heldout(job.run, state, job.corpus, is_stopped, num_batches)
        if result:
            job.checkpoints.losses[step] = result[0]
            job.log.evaluation(step, result)
    return result


def evaluate_or_stop(job: Job, state, step: int) -> None:
    """Evaluate during the run; a stop meanwhile saves here, so that going on begins with this evaluation.

    Raises:
      Interrupted: it was stopped.
    """
    if evaluate_now(job, state, step, job.config.evaluation.batches, job.signals.agreed) is None:
        save(job, state, step, ends=True)
        raise Interrupted(step)


def close(job: Job, state) -> list[str]:
    """Evaluate all held-out documents, draw a sample, and print and return the summary."""
    lines, corpus, workdir, step = [""], job.corpus, job.checkpoints.address, job.config.train.steps
    if corpus:
        job.log.display.phase("evaluating all held-out documents")
        lines += heldout_lines(*evaluate_now(job, state, step, None, lambda: False), corpus)
    lines.append(f"speed: {job.log.average_tokens_per_second():,.0f} tokens/s over {job.log.total_tokens:,} tokens")
    lines.append(job.log.goodput.line())
    lines.append(f"checkpoint: {workdir}/checkpoints/{step}")
    if corpus and corpus.tokenizer and job.config.evaluation.sample_tokens:
        with job.clock.within("evaluation"):
            lines += sample_lines(job.run, state.evaluated, corpus.tokenizer)
        lines.append(f'next: .venv/bin/python generate.py --workdir={workdir} --prompt="class " --max_tokens=64')
    job.log.display.lines(lines)
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
    config, flags = command.config, command_line.FLAGS
    command_line.join(command)
    command_line.log_to(command.workdir)
    if command.num_devices is None:
        validation.validate(config, jax.device_count(), command.loaded)
    if flags.verify_checkpoints:
        lines, all_good = inspection.checkpoints_table(command.address, retention(config))
        print("\n".join(lines))
        if not all_good:
            raise Damaged(f"{command.address} has damaged checkpoints")
    elif flags.explain_step is not None:
        print("\n".join(inspection.explain_step(config, command.workdir, command.address, flags.explain_step)))
    elif flags.evaluate_only:
        evaluate_only(config, command.address, any(command.loaded.typed.get(key) for key in DATA_READ))
    else:
        print("\n".join([*(command.banner() if processes.index() == 0 else []), *device_lines(config)]), flush=True)
        train(
            config, command.workdir, bucket=command.bucket, topology=command.loaded.topology,
            vocab_size_typed="model.vocab_size" in command.loaded.typed,
            faults=parse_faults(flags.faults), started=command_line.STARTED,
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
