# SPDX-License-Identifier: Apache-2.0
"""Train a model: python train.py --config=configs/small.py --workdir=runs/small [--topology=v4-32]

A run in the workdir is resumed from its newest valid checkpoint. With --evaluate_only that checkpoint is evaluated, on
all documents of other data if --config.data.path is given.
"""

from core import command_line
from configs.errors import ConfigError

flags = command_line.flags
flags.DEFINE_bool("evaluate_only", False, "evaluate the newest checkpoint of the workdir, train nothing")
flags.DEFINE_bool("verify_checkpoints", False, "list the workdir's checkpoints, each with a verdict; train nothing")
flags.DEFINE_integer("explain_step", None, "print which documents a step of the workdir's run trained on", 1)
flags.DEFINE_string("profile", "", "trace the steps START:STOP and summarise them, see docs/profiling.md")
flags.DEFINE_bool("tune", False, "try the advice of a profile, and print the keys that help; see docs/profiling.md")
flags.DEFINE_string("faults", "", "faults to inject, see core/between_steps/faults.py: kill:1@300,nan@550,...")


def use_of_run(parsed) -> str:
    """Return whether the run in the workdir is trained or only read; ConfigError if it is read in two ways."""
    asked = [name for name in ("evaluate_only", "verify_checkpoints", "explain_step", "tune") if parsed[name].value]
    others = [*asked[1:], *(name for name in ("profile", "faults") if parsed[name].value)]
    if asked and others:
        raise ConfigError(f"--{asked[0]} and --{others[0]} do not go together; give one")
    return command_line.TRAIN if asked in ([], ["tune"]) else command_line.READ


if __name__ == "__main__":
    COMMAND = command_line.parse(__doc__, use=use_of_run)

import contextlib
import dataclasses
import functools
import io
import pathlib
import time
from collections.abc import Callable, Sequence

import jax

from checkpointing import frozen_models, host_folders, lease, workdir as workdirs
from checkpointing.bucket import syncing
from checkpointing.checkpoints import Checkpoints, Damaged
from checkpointing.lost_data import DataGone, LostData
from checkpointing.retention import Retention
from checkpointing.store import Store
from cluster import processes
from cluster.interruption import Interrupted, check_main_thread, interruption
from cluster.maintenance import maintenance_notices
from cluster.watch import HeartbeatFile, watchdog
from core import assembly, ending, inspection
from core.callbacks import Callback, Recheck, Reshard, Save, StepsInAThread, Stop, Stopped, as_list
from core.evaluators import Evaluator, evaluate_newest
from core.between_steps.faults import Fault, Faults, NaNGradients, parse_faults
from core.job import Job, digest, losses_of
from core.between_steps.user_errors import save_on_user_error
from core.between_steps.run_report import RunReport
from core.sampling import BatchSampler, samples
from core.between_steps.slow_data import SlowData
from core.between_steps.stages import Stages, position_of
from core.start import (
    announce, announce_restart, check_finite, check_imported, check_inputs, check_new, device_lines, initial_state,
    is_done, kept_steps, may_change, prepare, prepare_corpus, set_steps,
)  # fmt: skip
from input_pipeline import corpus as corpora, ledger
from input_pipeline.errors import DataError
from profiling import tuning, windows
from profiling.recording import Profile
from reporting import preflight, sink, step_log
from reporting.clock import Clock
from reporting.display import Display
from reporting.goodput import Goodput
from reporting.metrics import MetricsWriter
from settings import cycles, layouts, preference, ramp, stored_config
from settings.keys import DATA_READ, flat
from training import replicas
from training.compiled_steps import CompiledSteps, Shape, shape_of


@dataclasses.dataclass(frozen=True)
class Result:
    """How a call of `train` ended.

    Attributes:
      step: the last step.
      reason: "finished", "nothing to train", or the reason of a callback's Stop.
      metrics: the scalars of the last step by name, such as `loss`; {} if nothing was trained.
      evaluations: {name of an evaluator: its last figures}.
      checkpoint: the last checkpoint: the place of its store, and its step.
    """

    step: int
    reason: str
    metrics: dict[str, float]
    evaluations: dict[str, dict[str, float]]
    checkpoint: str


def train(
    config, workdir: pathlib.Path, batches=None, *, callbacks: Sequence[Callback] = (),
    evaluators: Sequence[Evaluator] = (), bucket=None, topology=None, vocab_size_typed: bool = True,
    faults: Sequence[Fault] = (), started: float | None = None, origin: dict | None = None, store: Store | None = None,
) -> Result:  # fmt: skip
    """Train up to `train.steps`, then evaluate and print a summary. Call it in the main thread, which gets signals.

    Args:
      config: validated, its mesh resolved.
      workdir: folder of metrics, checkpoints and logs; an earlier run in it is resumed.
      batches: dictionaries of int32 [global_batch, sequence_length] arrays; one more than used may be read. The first
        is the batch after the restored step; in a ramp, sizes follow the ramp. Default: the corpus of `config.data`.
      callbacks: act between steps, see core/callbacks.py; in addition to those of every run, and to `batches` if
        that is one, as core/loader.py.
      evaluators: in addition to those of the corpus, see core/evaluators.py.
      bucket: bucket whose local copy is `workdir`; checkpoints are copied there.
      topology: hardware preset, for its peak.
      vocab_size_typed: whether a corpus too small for `model.vocab_size` is an error.
      faults: to inject.
      started: time.monotonic() at the start of this process; default: now.
      origin: contents of the run's run.json, see settings/stored_config.py.
      store: where checkpoints are kept, see checkpointing/store.py; default: in `workdir` or the bucket. If the
        processes do not share it, each may have a `workdir` of its own.

    Raises:
      Interrupted: SIGINT or SIGTERM arrived; the state is saved.
      NonFinite: the run diverged, and rolling back did not help.
      DataGone: data became unreadable; the last good state is saved.
      SaveFailed: the last state could not be saved.
    """
    check_main_thread()
    config, workdir = config.copy_and_resolve_references(), workdirs.local_folder(workdir)  # keys are set below
    ending.threads_end_the_process()
    callbacks = as_list("callbacks", callbacks, Callback) + ([batches] if isinstance(batches, Callback) else [])
    evaluators = as_list("evaluators", evaluators, Evaluator)
    clock = Clock(time.monotonic() if started is None else started)
    asked = {key: flat(config)[key] for key in ("batch.fit", "train.gradient_accumulation")}
    is_new = not (bucket or store or (workdir / stored_config.CONFIG).exists())
    run, corpus, evaluators = prepare(
        config, workdir, evaluators, reads_corpus=batches is None, is_new=is_new, vocab_size_typed=vocab_size_typed
    )
    batches = None if batches is None else iter(batches)  # which may start processes
    store = store or host_folders.of_config(config, workdir, bucket)
    staging = config.checkpoint.staging or (bucket and bucket.folder / "staging")
    with (
        workdirs.exclusive(
            workdir,
            is_copy=bucket is not None or (store is not None and not store.is_shared),
            per_host=config.checkpoint.per_host,
        ),
        lease.held(bucket and bucket.url),
        Checkpoints(
            bucket.url if bucket else workdir, Retention.of_config(config.checkpoint), staging=staging, store=store
        ) as checkpoints,
    ):
        checkpoints.on_save = send = syncing(bucket, processes.log_file(workdir), first=processes.index() == 0)
        record = workdirs.check_resumable(
            checkpoints, flat(config), digest(corpus), workdir, functools.partial(may_change, run)
        )
        if not record and not is_new:
            check_new(config, corpus)
            announce_restart(workdir)
        if record and "weights_only" in record:
            check_imported(run, checkpoints, record, workdir)
        corpus = corpus.resume(record) if corpus and record else corpus
        start, last_step = set_steps(config, corpus, record)
        has_ended = is_done(record, start, last_step, workdir)
        if not has_ended:
            run.objective.check_to_train()
        since = "has no effect, since no step follows" if has_ended else f"from step {start} on"
        for change in stored_config.changes(record["config"], flat(config)) if start else ():
            announce(f"{change} {since}")
        if has_ended:
            return Result(start, "nothing to train", {}, {}, f"{checkpoints.store.place}/{start}")
        if start and (line := kept_steps(config, record)):
            announce(line)
        refs = frozen_models.references(run, record)
        if workdirs.keeps_files(config):
            workdirs.open_workdir(workdir, flat(config) | asked, corpus, origin)
        send()
        try:
            result = run_training(
                config, workdir, checkpoints, record, refs, corpus, batches, topology, clock, faults, callbacks,
                evaluators,
            )  # fmt: skip
        except (Interrupted, step_log.NonFinite, DataGone):
            with contextlib.suppress(*checkpoints.store.failures):  # a bucket error must not hide the first error
                send()
            raise
        send()
        return result


def run_training(
    config, workdir: pathlib.Path, checkpoints: Checkpoints, record, checkpoint_refs, corpus, batches, topology, clock,
    faults, callbacks, evaluators,
) -> Result:  # fmt: skip
    """Train from the checkpoint of `record`, or from step 0, to the last step, and write the summary."""
    last_step, first = config.train.steps, processes.index() == 0
    goodput = Goodput(clock, workdir / "workers" / "0.json", record["goodput"] if record and record["step"] else None)
    display = Display(last_step, quiet=not first)
    step, _, increases = position_of(record)
    stages = Stages(config, record)
    shape = stages.shape(step)
    run_of = functools.cache(functools.partial(run_of_shape, config, on_microbatch=display.microbatch))
    run = run_of(shape._replace(rows=config.train.global_batch))
    injected = Faults(faults, workdir, clock, lambda: nan_step(config, job.compiled_steps))
    with (
        MetricsWriter(workdir, sinks=sink.sinks_of(config, workdir, processes.index()), first=first) as writer,
        MetricsWriter(workdir, "rollouts.jsonl", first=first and samples(run.objective)) as rollouts,
        display,
        watchdog(clock, 0 if run.slow else config.train.hang_seconds, processes.log_file(workdir)),
        interruption() as signals,
        maintenance_notices(signals.ask),
        contextlib.ExitStack() as context,
    ):
        clock.enter("compile", step)
        frozen = frozen_models.weights(run, checkpoint_refs)
        compiled_steps = CompiledSteps(lambda shape: run_of(shape).compile(), shape, frozen)
        peak = preflight.peak_flops(topology, run.mesh.size)
        end = min(ramp.stage_end(config, step, increases), cycles.stage_end(config, step))
        display.lines(preflight.report(run_of(shape), compiled_steps.get(shape), end - step, peak, record is None))
        display.lines([ramp.line(config)] if config.batch.ramp != "none" else [])
        last = cycles.after(config, last_step - 1)  # of the last step
        largest = run_of(shape._replace(rows=config.train.global_batch, cycles=last))
        log = step_log.StepLog(
            run, writer, display, goodput=goodput, peak_flops=peak[0], most_flops=largest.flops_per_step, record=record
        )
        for early in checkpoints.early_events:
            log.event("", **early)
        checkpoints.report, checkpoints.losses = log.event, losses_of(record)
        in_thread = [StepsInAThread()] if run.slow and processes.count() == 1 else []
        job = Job(
            config=config, workdir=workdir, run_of=run_of, compiled_steps=compiled_steps, stages=stages,
            callbacks=[injected, *in_thread, Recheck(), stages, SlowData(), *callbacks, RunReport()],
            evaluators=evaluators, checkpoints=checkpoints, checkpoint_refs=checkpoint_refs, corpus=corpus,
            batches=batches, topology=topology, clock=clock, log=log, rollouts=rollouts, signals=signals,
            lost=LostData(signals), context=context, batch_sampler=BatchSampler(checkpoints.address),
            roll_backs=processes.shared("roll backs", lambda: ledger.roll_backs(workdir)) if record else 0,
        )  # fmt: skip
        reason = run_job(job, record)
        # A signal that came after a callback's Stop, as while a profile is read. A finished run has nothing to stop.
        if reason != "finished" and any(processes.gather("asked to end", signals.requested)):
            raise Interrupted(log.last_step)
    step, place = log.last_step, checkpoints.store.place
    return Result(step, reason, log.last_figures, job.evaluations, f"{place}/{step}")


def run_job(job: Job, record: dict | None) -> str:
    """Train to the end; return the reason of a Result."""
    reason = None
    with HeartbeatFile(job.workdir, job.log), contextlib.ExitStack() as ends:  # which calls all, even if one fails
        ends.callback(job.log.close)
        ends.callback(job.compiled_steps.close)
        for callback in reversed(job.callbacks):
            ends.callback(lambda callback=callback: callback.on_end(job, has_failed=reason is None))
        ends.callback(job.log.account)
        if job.corpus:
            job.corpus.announce_rebuilds_to(job.report_progress)
        try:
            reason = finish(job, train_with_roll_backs(job, record))
        except Stopped as stopped:
            reason = str(stopped)
        except DataError as error:  # its exit status would say that nothing was trained
            raise DataGone(str(error)) from error
    return reason


def run_of_shape(config, shape: Shape, **options) -> assembly.Run:
    """Assemble the run for batches of a shape; `options` are those of `assemble`."""
    of_stage = cycles.of_pair(layouts.on_mesh(config, shape.mesh), shape.cycles)
    return assembly.assemble(of_stage, rows=shape.rows, **options)


def nan_step(config, compiled_steps: CompiledSteps) -> Callable:
    """Return a train_step with NaN gradients, for batches of any shape."""

    def step(state, batch):
        shape = shape_of(batch, compiled_steps.cycles)
        return run_of_shape(config, shape, transforms=[NaNGradients()]).compile()(state, batch, compiled_steps.frozen)

    return step


def train_with_roll_backs(job: Job, record: dict | None):
    """Train to the last step and return the state; if the run diverges, roll back and skip the bad batches."""
    while True:
        try:
            return train_from(job, record)
        except step_log.Diverged as trouble:
            record = job.roll_back(trouble)


def train_from(job: Job, record: dict | None):
    """Train from a checkpoint, or from step 0, to the last step; return the state. Raises Stopped for a callback."""
    train, clock = job.config.train, job.clock
    start, last_step = position_of(record)[0], train.steps
    clock.enter("start_up", start)
    batches = job.start(record)
    state = initial_state(job.run, job.checkpoints, record)
    check_finite(state)
    replicas.check(state, job.run.mesh)
    job.checkpoints.begun = start if record else None
    job.evaluate_or_stop(job.missed(record) if start else (), state, start)
    save_every = 1 if job.run.slow else train.save_every
    for step in range(start + 1, last_step + 1):
        clock.enter("data", step)
        batch = job.next_batch(batches, state, step)
        if jax.default_backend() == "cpu":  # CPU devices accept a step only after the previous one is done
            clock.enter("wait")
            job.log.wait()
        clock.enter("step")
        state, scalars = job.train_step(state, batch)
        clock.enter("wait")
        job.log.add(step, scalars, job.stages.rows)
        with save_on_user_error(job, state, step):
            actions = job.ask_callbacks(state, step)
        interrupted = job.signals.agreed()
        ends = interrupted or Stop in actions or step == last_step
        if ends or Save in actions or step_log.every(step, save_every) or job.checkpoints.due_again(step, save_every):
            job.save(state, step, ends=ends)
        if interrupted:
            raise job.lost.stop_error(step)
        if stop := actions.get(Stop):
            raise Stopped(stop.reason)
        job.evaluate_or_stop(job.due(step), state, step)
        if reshard := actions.get(Reshard):
            state = job.reshard(state, step, reshard.shape)
    return state


def finish(job: Job, state) -> str:
    """Evaluate, draw a sample and write the summary; the last state is already saved. Return the reason of a Result."""
    with job.signals.saved_at(job.config.train.steps):
        if any(processes.gather("asked to stop", job.signals.requested)):  # a stop that came after the last boundary
            raise Interrupted(job.config.train.steps)
        lines = job.close(state)
        if processes.index() == 0:
            workdirs.write_summary(job.workdir, lines)
    return "finished"


def main(command: command_line.Command) -> None:
    """Join the other processes, validate the configuration for the devices, and train, evaluate or inspect."""
    config, given = command.config, command_line.FLAGS
    faults = parse_faults(given.faults)
    profile = Profile(windows.parse(given.profile) if given["profile"].present else None)
    command_line.join(command)
    command_line.log_to(command.workdir)
    store = host_folders.of_config(config, command.workdir, command.bucket)
    if given.verify_checkpoints:
        retention = Retention.of_config(config.checkpoint)
        lines, all_good = inspection.checkpoints_table(command.address, command.workdir, retention, store)
        announce("\n".join(lines))
        if not all_good:
            raise Damaged(f"{command.address} has damaged checkpoints")
    elif given.explain_step is not None:
        lines = inspection.explain_step(config, command.workdir, command.address, given.explain_step, store)
        announce("\n".join(lines))
    elif given.evaluate_only:
        preference.to_evaluate(config)
        if any(command.loaded.typed.get(key) for key in DATA_READ):
            corpus = corpora.prepare_to_evaluate(config.data, vocab_size=config.model.vocab_size)
            check_inputs(config, corpus)
        else:
            corpus = prepare_corpus(config, vocab_size_typed=True)
        evaluate_newest(config, command.workdir, command.address, corpus, store)
    elif given.tune:
        tune(config, command)
    else:
        print("\n".join([*(command.banner() if processes.index() == 0 else []), *device_lines(config)]), flush=True)
        result = train(
            config, command.workdir, bucket=command.bucket, topology=command.loaded.topology,
            vocab_size_typed="model.vocab_size" in command.loaded.typed,
            faults=faults, started=command_line.STARTED, origin=command.origin, callbacks=[profile],
        )  # fmt: skip
        if given.profile and result.reason == "nothing to train" and processes.index() == 0:
            print(f"--profile={given.profile}: nothing is traced")
    processes.leave()


def tune(config, command: command_line.Command) -> None:
    """Print which changes of advice make a step of this configuration faster."""
    ending.continues(False)

    def quietly(*arguments, **named) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            train(*arguments, **named)

    show = functools.partial(print, flush=True) if processes.index() == 0 else lambda line: None
    tuning.tune(
        quietly, config, command.workdir, show, topology=command.loaded.topology,
        vocab_size_typed="model.vocab_size" in command.loaded.typed,
    )  # fmt: skip


if __name__ == "__main__":
    main(COMMAND)
