# SPDX-License-Identifier: Apache-2.0
"""The state of a process during training, and its work between steps: save, evaluate, reshard, roll back."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from checkpointing import workdir as workdirs
from checkpointing.checkpoints import Checkpoints
from checkpointing.lost_data import LostData
from cluster import processes
from cluster.interruption import Interruption
from core import assembly, inspection, sampling
from core.between_steps.bad_checkpoints import Suspicion, example_after, set_aside
from core.between_steps.stages import Stage, Stages, position_of
from core.between_steps.user_errors import save_on_user_error
from core.callbacks import Callback, RollBack, check_action, check_all_act, wrapped
from core.evaluation import checked_batches, next_lines, sample_lines
from core.evaluators import EvaluationContext, Evaluator, as_numbers, lines_of, without_figures
from files.atomic import write_atomically
from inference.engine import decodes
from input_pipeline import batches as pipeline
from input_pipeline import corpus as corpora
from input_pipeline import ledger
from input_pipeline.errors import DataError, DataLost
from parallelism import resharding
from parallelism.mesh import mesh_context
from parallelism.placement import check_batches, local_rows, place
from reporting import display, step_log
from reporting.clock import Clock
from reporting.metrics import MetricsWriter
from reporting.step_log import NonFinite, every
from settings import layouts
from settings.keys import flat
from training.compiled_steps import CompiledSteps, Shape
from training.step import is_finite


@dataclasses.dataclass
class Job:
    """The state of a process during training."""

    config: object  # as given; the present mesh may differ
    workdir: pathlib.Path
    run_of: Callable[[Shape], assembly.Run]
    compiled_steps: CompiledSteps
    stages: Stages
    callbacks: Sequence[Callback]  # `stages` is one of them
    evaluators: Sequence[Evaluator]
    checkpoints: Checkpoints
    checkpoint_refs: dict  # references of the frozen weights by role, see checkpointing/frozen_models.py
    corpus: corpora.Corpus | None
    batches: Iterator | None  # of the caller, in place of a corpus
    topology: object
    clock: Clock
    log: step_log.StepLog
    rollouts: MetricsWriter  # of rollouts.jsonl
    signals: Interruption
    lost: LostData
    batch_sampler: sampling.BatchSampler
    context: contextlib.ExitStack  # holds the context of the present mesh
    roll_backs: int  # number of them so far
    shape: Shape | None = None  # of the present stage, with the full batch
    run: assembly.Run | None = None  # of this shape
    train_step: Callable | None = None  # `compiled_steps`, wrapped by the callbacks
    suspicion: Suspicion = dataclasses.field(default_factory=Suspicion)  # of a restored checkpoint
    begun: list[Stage] = dataclasses.field(default_factory=list)  # stages since the start or the last roll back
    sections: list = dataclasses.field(default_factory=list)  # of the ledger, not written yet
    evaluations: dict = dataclasses.field(default_factory=dict)  # {name: the last figures} of the evaluators
    callback_seconds: float = 0.0  # that callbacks took after steps

    def __post_init__(self):
        self.train_step = wrapped(self.compiled_steps, self.callbacks, self)

    def start(self, record: dict | None) -> Iterator[dict]:
        """Start from a checkpoint or from step 0; return an iterator of the batches up to the last step.

        A batch is on the devices and has the run's shape at that step. Batches of one shape are prefetched.
        """
        for callback in self.callbacks:
            callback.on_start(self, record)
        step, examples, _ = position_of(record)
        self.begin_stage(step, self.stages.shape(step))
        self.begun = []
        stages = self._stages(step, examples)
        return chain(next(stages, ()), chain.from_iterable(stages))

    def _stages(self, step: int, examples: int) -> Iterator[Iterator[dict]]:
        while step < self.config.train.steps:
            stage = Stage(step, examples, self.stages.rows)
            num_steps = self.stages.end - step
            if not self.begun or self.begun[-1].rows != stage.rows:
                self.begun.append(stage)
                self.record_stage(stage)
            yield self._batches(stage, num_steps)
            step, examples = step + num_steps, examples + num_steps * stage.rows

    def _batches(self, stage: Stage, num_steps: int) -> Iterator[dict]:
        """Return the batches of `num_steps` steps of one size, from the corpus or from the iterator of the caller."""
        train, data, sharding = self.config.train, self.config.data, self.run.batch_sharding
        rows = local_rows(sharding, stage.rows)
        if not self.corpus:
            size = self.config.model.vocab_size if "segments" in self.run.abstract_batch else 0  # 0: no texts
            full = check_batches(self.batches, num_steps, self.run.abstract_batch, stage.rows, size)
            own = ({key: array[rows] for key, array in batch.items()} for batch in full)
            return place(own, sharding, stage.rows)
        batches = pipeline.training_batches(
            self.corpus.train, seed=train.seed, sequence_length=train.sequence_length,
            global_batch=stage.rows, rows=rows, first_example=stage.examples, num_steps=num_steps,
            readers=data.readers, prefetch=data.prefetch, on_lost=self.lost.record, ahead=self.lost.ahead,
        )  # fmt: skip
        try:
            placed = place(checked_batches(batches, self.run, self.corpus.train.parts[0]), sharding, stage.rows)
        except DataError:  # of the first batch; `lost` has recorded it
            placed = iter(())
        if self.lost.gather_reason():
            raise DataLost(self.lost.reason)
        return placed

    def report_progress(self, line: str) -> None:
        """Show the progress of data that is rebuilt during training, and count it as progress; from any thread."""
        self.clock.progress(line)
        self.log.display.line(line)

    def next_batch(self, batches: Iterator[dict], state, step: int) -> dict:
        """Return the batch of a step; if it cannot be read, save the state of the previous step and raise DataGone."""
        try:
            with save_on_user_error(self, state, step - 1):
                return self._sampled(next(batches), state, step)
        except DataError as error:
            self.lost.record(error)
            if step > 1:
                self.save(state, step - 1, ends=True)
            raise self.lost.stop_error(step - 1) from error

    def _sampled(self, batch: dict, state, step: int) -> dict:
        """Return the batch that the objective samples from the live parameters, or `batch` if it samples none."""
        if not sampling.samples(self.run.objective):
            return batch
        with self.clock.within("wait"):
            self.log.flush()  # the previous step is not part of the rollout
        with self.clock.within("rollout"):
            sampled = self.batch_sampler.sample(self.run, state.params, self.compiled_steps.frozen, batch, step)
        for record in sampled.records:
            self.rollouts.write("rollout", step=step, **record)
        return sampled.batch

    def ask_callbacks(self, state, step: int) -> dict[type, object]:
        """Return the actions that the callbacks want after a step, by type. Raises Diverged for RollBack."""
        actions, began = {}, time.perf_counter()
        for callback in self.callbacks:
            if (action := callback.on_step(self, state, step)) is not None:
                check_action(callback, action, self.stages.shape(step), step)
                actions[type(action)] = action
        self.callback_seconds += time.perf_counter() - began
        check_all_act(actions, self, step)
        if back := actions.get(RollBack):
            raise step_log.Diverged(back.reason, back.first_step, step, applied=True)
        return actions

    def begin_stage(self, step: int, shape: Shape) -> None:
        """Switch to the mesh of the steps after `step`, and start to compile the step of the stage after them."""
        self.shape = shape._replace(rows=self.config.train.global_batch)
        self.run = self.log.run = self.run_of(self.shape)
        self.context.close()
        self.context.enter_context(mesh_context(self.run.mesh))
        self.compiled_steps.cycles = shape.cycles
        self.compiled_steps.frozen = resharding.reshard(self.compiled_steps.frozen, self.run.abstract_frozen)
        if following := self.stages.begin(step):
            self.compiled_steps.start(following)

    def reshard(self, state, step: int, shape: Shape):
        """Return the state for the next step, whose batch size or mesh differs."""
        self.log.flush()
        before = self.run.mesh
        with self.clock.within("compile"):
            self.compiled_steps.get(shape)
            self.begin_stage(step, shape)
            return state if self.run.mesh == before else self._moved(state, step, shape)

    def _moved(self, state, step: int, shape: Shape):
        (most, total), began = resharding.bytes_received(state, self.run.abstract_state), time.monotonic()
        state = resharding.reshard(state, self.run.abstract_state)
        seconds, mesh = time.monotonic() - began, layouts.text(shape.mesh)
        self.log.event(
            f"step {step}: mesh {mesh} from here on; {most:,} bytes of the state are new to a device, "
            f"{total:,} to all, moved in {seconds:.2f} s", "mesh", step,
            mesh=mesh, bytes_to_a_device=most, bytes_to_all=total, seconds=seconds,
        )  # fmt: skip
        return state

    def examples_before(self, step: int) -> int:
        stage = next((stage for stage in reversed(self.begun) if stage.step < step), self.begun[0])
        return stage.examples + max(0, step - stage.step - 1) * stage.rows

    def save(self, state, step: int, *, ends: bool) -> None:
        """Start to write a checkpoint of a state; if the run `ends`, wait until it is written, or raise SaveFailed.

        If the loss or gradient of the last step was not finite, the state is not saved, unless the run ends: finite
        parameters may be so large that no gradient is finite. Raises Diverged if the state is not finite, or if the
        loss or gradient of the run's last step is not finite.
        """
        self.log.flush()
        if not is_finite(state):  # outside the phase "save", since a process may wait here for another
            raise step_log.Diverged("the parameters or moments are not finite", step, step)
        if not self.log.last_finite and step == self.config.train.steps:
            raise step_log.Diverged("the loss or the gradient of the last step is not finite", step, step)
        if not (self.log.last_finite or ends):
            self.checkpoints.postpone(f"step {step} not saved: its loss or its gradient is not finite", step)
            return
        with self.clock.within("save"):
            record = self.log.record() | {"frozen": self.checkpoint_refs}
            record |= {
                "step": step, "examples": int(state.examples), "increases": self.stages.increases,
                "config": flat(self.config), "corpus": digest(self.corpus),
                "mixture": self.corpus.train.record() if self.corpus else [],
                "skips": self.corpus.train.skips if self.corpus else [], "losses": self.checkpoints.losses,
                "topology": self.topology.name if self.topology else None,
            }  # fmt: skip
            self.rewrite_missing_files()
            batch = self.batch_sampler.saving(step, self.run, self.checkpoints.store.steps)
            write = self.checkpoints.save_and_wait if ends else self.checkpoints.save
            write(step, state, record, batch)

    def rewrite_missing_files(self) -> None:
        """Rewrite the files that a checkpoint needs, if the folder was emptied during the run."""
        if workdirs.keeps_files(self.config):
            self.write_ledger(may_wait=True)
            if not (self.workdir / "config.json").exists():
                with contextlib.suppress(OSError):  # if the disk is full, the save reports it
                    self.workdir.mkdir(parents=True, exist_ok=True)
                    workdirs.open_workdir(self.workdir, flat(self.config), self.corpus)

    def record_stage(self, stage: Stage) -> None:
        """Record in the ledger how the steps from here on map to examples."""
        if self.corpus and workdirs.keeps_files(self.config):
            train = self.config.train
            section = ledger.new_section(
                self.corpus, step=stage.step, examples=stage.examples, global_batch=stage.rows,
                sequence_length=train.sequence_length, seed=train.seed,
            )  # fmt: skip
            self.sections.append(section | {"roll_backs": self.roll_backs})
            self.write_ledger(may_wait=self.roll_backs > 0 or len(self.begun) > 1)

    def write_ledger(self, *, may_wait: bool) -> None:
        """Write the pending sections of the ledger; if they `may_wait`, a full disk does not end the run."""
        try:
            while self.sections:
                ledger.append(self.workdir, self.sections[0])
                self.sections.pop(0)
        except DataError as error:
            if not may_wait:
                raise
            self.log.event(str(error), "ledger_waits")

    def due(self, step: int) -> list[Evaluator]:
        """Return the evaluators that are due after a step; `close` runs all of them after the last step."""
        return [one for one in self.evaluators if step < self.config.train.steps and every(step, one.every)]

    def missed(self, record: dict) -> list[Evaluator]:
        """Return the evaluators whose figures a resumed run lacks."""
        due = self.due(record["step"])
        return without_figures(due, self.evaluators, self.workdir, record, self.checkpoints.losses)

    def evaluate(self, evaluator: Evaluator, state, step: int, stop: Callable[[], bool], *, is_last: bool):
        """Evaluate and log; return (context, figures), the figures None if stopped or if data is unreadable."""
        stopped = False

        def is_stopped() -> bool:
            nonlocal stopped
            self.clock.enter("evaluation")  # one more batch is progress
            stopped = stop()
            return stopped

        self.log.flush()  # the pending step is not part of the evaluation
        context = EvaluationContext(
            run=self.run, params=self.eval_params(state), frozen=self.compiled_steps.frozen, corpus=self.corpus,
            workdir=self.workdir, step=step, is_last=is_last, stop=is_stopped, on_lost=self.lost.record,
            progress=self.log.display.evaluated,
        )  # fmt: skip
        with self.clock.within("evaluation"):
            figures = evaluator.evaluate(context)
            lost = self.lost.gather_reason()
            if figures is None and not (stopped or lost):  # else the run would end as if it had been interrupted
                raise TypeError(f"evaluator {evaluator.name} returned None and was not asked to stop")
            figures = None if lost or figures is None else as_numbers(evaluator, figures)
            if figures is not None:
                if evaluator.ranks_checkpoints and not math.isnan(figures["loss"]):
                    self.checkpoints.losses[step] = figures["loss"]
                self.evaluations[evaluator.name] = figures
                evaluator.report(self.log, step, figures)
        return context, figures

    def evaluate_or_stop(self, evaluators: Sequence[Evaluator], state, step: int) -> None:
        """Evaluate during training; if a stop arrives, save first, so that the resumed run repeats these evaluations.

        Raises Interrupted if it was stopped, DataGone if held-out documents became unreadable.
        """
        for evaluator in evaluators:
            with save_on_user_error(self, state, step):
                _, figures = self.evaluate(evaluator, state, step, self.signals.agreed, is_last=False)
            if figures is None:
                self.save(state, step, ends=True)
                raise self.lost.stop_error(step)

    def eval_params(self, state) -> dict:
        """Return the parameters to evaluate, including frozen ones."""
        return self.run.eval_params(state, self.compiled_steps.frozen)

    def close(self, state) -> list[str]:
        """Evaluate all held-out documents, draw a sample, print the summary and return it."""
        lines, corpus, address, step = [""], self.corpus, self.checkpoints.address, self.config.train.steps
        self.run = self.run_of(self.stages.complete(self.shape))
        if corpus:
            self.log.display.phase("evaluating all that is held out")
        for evaluator in self.evaluators:
            context, figures = self.evaluate(evaluator, state, step, lambda: False, is_last=True)
            if figures is None:
                raise self.lost.stop_error(step)
            lines += lines_of(evaluator, context, figures)
        speed = self.log.average_tokens_per_second()
        lines += [f"speed: {speed:,.0f} tokens/s over {self.log.total_tokens:,} tokens", self.log.goodput.line()]
        lines.append(f"checkpoint: {address}/checkpoints/{step}")
        if corpus and corpus.tokenizer and self.config.evaluation.sample_tokens and decodes(self.run.graph):
            if not corpus.is_of_conversations:
                with self.clock.within("evaluation"):
                    lines += sample_lines(self.run, self.eval_params(state), corpus)
            lines += next_lines(self.config, corpus, address)
        self.log.display.lines(lines)
        return lines

    def roll_back(self, trouble: step_log.Diverged) -> dict | None:
        """Skip the bad batches and return the record of the checkpoint to restore; None: step 0.

        Raises NonFinite after too many roll backs, or if the batches are from a caller's iterator.
        """
        # Batches that were skipped before a restart are consumed; the present batch size does not describe them.
        first, last = (self.examples_before(step) for step in (trouble.first_step, trouble.last_step + 1))
        if self.roll_backs >= self.config.train.roll_backs or not self.corpus:
            meant = "; if the loss was meant to rise, go on with --config.train.spike_deviations=0"
            raise NonFinite(
                f"{trouble} at step {trouble.last_step}, after {display.counted(self.roll_backs, 'roll back')}; "
                f"{'checkpoints may have these steps' if trouble.applied else 'nothing bad was saved'}; "
                f"{self.write_bad_documents(trouble)}use a lower --config.optimizer.learning_rate in a new --workdir"
                f"{meant if trouble.was_finite else ''}"
            )
        self.roll_backs += 1
        self.checkpoints.wait()
        self.checkpoints.owes = False
        if trouble.applied:
            set_aside(self.checkpoints, trouble)
        record = self._restore_record()
        if record and self.suspicion.finds_bad(self.checkpoints, trouble, record["step"]):
            record = self._restore_record()
        step, examples, _ = position_of(record)
        first = example_after(trouble, first, examples, self.begun[0].step)
        self.corpus = dataclasses.replace(self.corpus, train=self.corpus.train.skip(first, last))
        self.log.goodput.lost_since(record["goodput"]["parts"] if record else {})
        self.log.event(
            f"{trouble}; back to step {step}, leaving out {display.counted(last - first, 'example')} up to step "
            f"{trouble.last_step}'s", "roll_back", step,
            first_step=trouble.first_step, last_step=trouble.last_step,
        )  # fmt: skip
        return record

    def _restore_record(self) -> dict | None:
        """Return the record of the newest valid checkpoint, or None, and resume the log from it."""
        step = self.checkpoints.newest() if self.checkpoints.steps() else None
        record = self.checkpoints.record(step) if step is not None else None
        self.checkpoints.losses = losses_of(record)
        self.log.resume(record)
        return record

    def write_bad_documents(self, trouble: step_log.Diverged) -> str:
        """Write the documents of the bad batches to a file; return its place as part of a sentence, "" without any."""
        if not self.corpus or sampling.samples(self.run.objective):  # which trains on what the model draws
            return ""
        path, steps = self.workdir / "bad_documents.txt", range(trouble.first_step, trouble.last_step + 1)
        try:
            if processes.index() == 0:
                lines = inspection.documents_of(self.config, self.workdir, steps)
                write_atomically(path, "\n".join(lines).encode())
        except (OSError, DataError) as error:
            return f"the documents of the bad batches could not be written down ({error}); "
        return f"the documents of the bad batches are in {path}: mend them, or "


def digest(corpus: corpora.Corpus | None) -> str:
    """Return the digest of the data of a run; "" if the batches are from a caller's iterator."""
    return corpus.digest if corpus else ""


def losses_of(record: dict | None) -> dict[int, float]:
    """Return the held-out losses of earlier checkpoints by step."""
    return {int(step): loss for step, loss in record["losses"].items()} if record else {}
