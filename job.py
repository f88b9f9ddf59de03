# SPDX-License-Identifier: Apache-2.0
"""What a process has at hand while it trains, and what it does between steps: save, evaluate, go back."""

import contextlib
import dataclasses
import pathlib
import shlex
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import assembly
import inspection
from configs import layouts, ramp
from configs.keys import flat
from evaluation import evaluate_heldout, heldout_lines, opening, sample_lines, vote_and_keep, vote_lines
from input_pipeline import batches as pipeline
from input_pipeline import corpus as corpora
from input_pipeline import ledger
from input_pipeline.errors import DataError, DataLost
from parallelism import processes, reshaping
from parallelism.mesh import mesh_context
from parallelism.placement import check_shapes, local_rows, place
from training import noise_scale, step_log
from training import workdir as workdirs
from training.checkpoints import Checkpoints
from training.clock import Clock
from training.interruption import Interruption
from training.lost_data import LostData
from training.programs import Programs, Shape
from training.step import every, is_finite
from training.step_log import NonFinite


class Stage(NamedTuple):
    """Steps whose batches are of one size: those after `step`, before which `examples` were taken."""

    step: int
    examples: int
    rows: int


@dataclasses.dataclass
class Job:
    """What a process has at hand while it trains."""

    config: object  # as given, whatever mesh the run is on
    run_of: Callable[[Shape], assembly.Run]
    programs: Programs
    train_step: Callable  # the programs', and what faults do to it
    workdir: pathlib.Path
    checkpoints: Checkpoints
    corpus: corpora.Corpus | None
    batches: Iterator | None
    topology: object
    clock: Clock
    log: step_log.StepLog
    signals: Interruption
    lost: LostData
    context: contextlib.ExitStack  # holds that of the mesh that the state is on
    roll_backs: int  # of the run
    pins: dict  # which weights steps take beside, by their role, see training/other_run.py
    run: assembly.Run | None = None  # of the whole batch, on that mesh
    stage_end: int = 0  # the last step of the present shape
    increases: int = 0  # of the size of its batch
    suspect: int | None = None  # step of a checkpoint from which the run took no update before it went back to it
    stages: list[Stage] = dataclasses.field(default_factory=list)  # since the run began or went back
    sections: list = dataclasses.field(default_factory=list)  # of the ledger, not written yet

    def evaluates(self, step: int) -> bool:
        """Whether held-out documents are evaluated after a step; after the last one they all are, in the end."""
        return self.corpus is not None and step < self.config.train.steps and every(step, self.config.train.eval_every)

    @property
    def rows(self) -> int:
        """Of the global batch, now."""
        return ramp.rows(self.config, self.increases)

    def training_batches(self, record: dict | None) -> Iterator[dict]:
        """Return an iterator of batches on the devices, from a checkpoint or the beginning to the last step.

        Each is of the shape that the run has come to when it is asked for; those of one shape are read ahead.
        """
        start, examples, self.increases = place_of(record)
        self.begin_stage(start)
        self.stages = []
        stages = self._stages(start, examples)
        return chain(next(stages, ()), chain.from_iterable(stages))

    def _stages(self, step: int, examples: int) -> Iterator[Iterator[dict]]:
        while step < self.config.train.steps:
            stage = Stage(step, examples, self.rows)
            num_steps = self.stage_end - step
            if not self.stages or self.stages[-1].rows != stage.rows:
                self.stages.append(stage)
                self.keep_ledger(stage)
            yield self._batches(stage, num_steps)
            step, examples = step + num_steps, examples + num_steps * stage.rows

    def _batches(self, stage: Stage, num_steps: int) -> Iterator[dict]:
        """Return the batches of some steps of one size, from the corpus, or from whole ones given from outside."""
        train, data, sharding = self.config.train, self.config.data, self.run.batch_sharding
        rows = local_rows(sharding, stage.rows)
        if not self.corpus:
            whole = check_shapes(self.batches, num_steps, self.run.abstract_batch, stage.rows)
            return place(({key: array[rows] for key, array in of.items()} for of in whole), sharding, stage.rows)
        batches = pipeline.training_batches(
            self.corpus.train, seed=train.seed, sequence_length=train.sequence_length,
            global_batch=stage.rows, rows=rows, first_example=stage.examples, num_steps=num_steps,
            readers=data.readers, prefetch=data.prefetch, on_lost=self.lost.lose, ahead=self.lost.ahead,
        )  # fmt: skip
        try:
            placed = place(batches, sharding, stage.rows)
        except DataError:  # of the first batch, which `lost` knows
            placed = iter(())
        if self.lost.agree():
            raise DataLost(self.lost.reason)
        return placed

    def tell(self, line: str) -> None:
        """Show how far data is that is built again while the run goes on, and that it gets on; from any thread."""
        self.clock.get_on(line)
        self.log.display.line(line)

    def next_batch(self, batches: Iterator[dict], state, step: int) -> dict:
        """Return the batch of a step; where it cannot be read any more, save the state before and raise DataGone."""
        try:
            return next(batches)
        except DataError as error:
            self.lost.lose(error)
            if step > 1:
                self.save(state, step - 1, ends=True)
            raise self.lost.stopped(step - 1) from error

    def grow(self, state, step: int) -> None:
        """Let the batch grow after a step, where the ramp says so."""
        config, train, rows = self.config, self.config.train, self.rows
        if rows == train.global_batch or step == train.steps or not every(step, config.batch.increase_step):
            return
        self.log.flush()
        larger = ramp.rows(config, self.increases + 1)
        if config.batch.ramp == "noise_scale" and float(noise_scale.of(state.noise)) < larger:
            return
        self.increases += 1
        if larger > rows:  # and not rounded to the same
            text = f"step {step}: batches of {larger} sequences from here on"
            self.log.event(text, "batch", step, global_batch=larger)

    def go_on(self, state, step: int):
        """Return the state after a step for the next one: where that is of another mesh, moved there."""
        if step < self.stage_end or step == self.config.train.steps:
            return state
        self.log.flush()
        before = self.run.mesh
        with self.clock.within("compile"):
            self.programs.program(self.shape(step))
            self.begin_stage(step)
            if self.run.mesh != before:
                state = self.reshaped(state, step)
        return state

    def shape(self, step: int) -> Shape:
        """Return what the next step after `step` is compiled for."""
        return Shape(self.rows, layouts.mesh_after(self.config, step))

    def begin_stage(self, step: int) -> None:
        """Turn to the mesh of the steps after `step`, and have the program of the stage after theirs compiled."""
        config, shape = self.config, self.shape(step)
        self.run = self.run_of(shape._replace(rows=config.train.global_batch))
        self.context.close()
        self.context.enter_context(mesh_context(self.run.mesh))
        self.programs.frozen = reshaping.reshape(self.programs.frozen, self.run.abstract_frozen)
        ramp_end = ramp.stage_end(config, step, self.increases)
        self.stage_end = min(ramp_end, layouts.stage_end(config, step))
        if self.stage_end < config.train.steps:
            grown = ramp.rows(config, self.increases + (ramp_end == self.stage_end))
            self.programs.begin(Shape(grown, layouts.mesh_after(config, self.stage_end)))

    def reshaped(self, state, step: int):
        """Return the state, moved to the present mesh."""
        (most, total), began = reshaping.bytes_moved(state, self.run.abstract_state), time.monotonic()
        state = reshaping.reshape(state, self.run.abstract_state)
        seconds, mesh = time.monotonic() - began, layouts.text(self.shape(step).mesh)
        self.log.event(
            f"step {step}: mesh {mesh} from here on; {most:,} bytes of the state are new to a device, "
            f"{total:,} to all, moved in {seconds:.2f} s", "mesh", step,
            mesh=mesh, bytes_to_a_device=most, bytes_to_all=total, seconds=seconds,
        )  # fmt: skip
        return state

    def taken_before(self, step: int) -> int:
        """Return how many examples had been taken before a step."""
        stage = next((stage for stage in reversed(self.stages) if stage.step < step), self.stages[0])
        return stage.examples + max(0, step - stage.step - 1) * stage.rows

    def save(self, state, step: int, *, ends: bool) -> None:
        """Begin to write a checkpoint of a state; if the run `ends`, return when it is written, or raise SaveFailed.

        A state that the last step could compute nothing finite with is not saved, unless the run is interrupted: its
        numbers may be finite, and so large that no gradient is.

        Raises Diverged if the state is not finite, or nothing finite could be computed with it in the last step of all.
        """
        self.log.flush()
        if not is_finite(state):  # in which a process may wait for another, so that it is no part of the phase
            raise step_log.Diverged(f"the parameters or moments after step {step} are not finite", step, step)
        if not self.log.last_finite and step == self.config.train.steps:
            raise step_log.Diverged(f"the loss or the gradient of step {step}, the last one, is not finite", step, step)
        if not (self.log.last_finite or ends):
            self.checkpoints.postpone(f"step {step} not saved: its loss or its gradient is not finite", step)
            return
        with self.clock.within("save"):
            record = self.log.record() | self.pins
            record |= {
                "step": step,
                "examples": int(state.examples),
                "increases": self.increases,
                "config": flat(self.config),
                "corpus": digest(self.corpus),
                "mixture": self.corpus.train.record() if self.corpus else [],
                "skips": self.corpus.train.skips if self.corpus else [],
                "losses": self.checkpoints.losses,
                "topology": self.topology.name if self.topology else None,
            }
            self.keep_what_is_needed()
            write = self.checkpoints.save_and_wait if ends else self.checkpoints.save
            write(step, state, record)

    def keep_what_is_needed(self) -> None:
        """Write again what the checkpoint is useless without, where the folder was emptied under the run."""
        if processes.index() == 0:
            self.write_ledger(may_wait=True)
            if not (self.workdir / "config.json").exists():
                with contextlib.suppress(OSError):  # no room: the save will say so
                    self.workdir.mkdir(parents=True, exist_ok=True)
                    workdirs.open_workdir(self.workdir, flat(self.config), self.corpus)

    def keep_ledger(self, stage: Stage) -> None:
        """Write down how the steps from here on map to examples."""
        if self.corpus and processes.index() == 0:
            train = self.config.train
            section = ledger.new_section(
                self.corpus, step=stage.step, examples=stage.examples, global_batch=stage.rows,
                sequence_length=train.sequence_length, seed=train.seed,
            )  # fmt: skip
            self.sections.append(section | {"roll_backs": self.roll_backs})
            self.write_ledger(may_wait=self.roll_backs > 0 or len(self.stages) > 1)

    def write_ledger(self, *, may_wait: bool) -> None:
        """Write down the sections that are not yet; where they `may_wait`, a disk without room does not end the run."""
        try:
            while self.sections:
                ledger.append(self.workdir, self.sections[0])
                self.sections.pop(0)
        except DataError as error:
            if not may_wait:
                raise
            self.log.event(str(error), "ledger_waits")

    def evaluated(self, state) -> dict:
        """Return the parameters that are evaluated, those that are frozen among them."""
        return self.run.evaluated(state, self.programs.frozen)

    def evaluate_now(self, state, step: int, num_batches: int | None, stop: Callable[[], bool]):
        """Evaluate, write and return ({name: mean}, weight of the loss); None where it was stopped, or data is lost."""

        def is_stopped() -> bool:
            self.clock.enter("evaluation")  # another batch of it
            return stop()

        self.log.flush()  # of a step, and so not within
        with self.clock.within("evaluation"):
            result = evaluate_heldout(
                self.run, self.evaluated(state), self.corpus, is_stopped, num_batches, self.programs.frozen,
                self.lost.lose,
            )  # fmt: skip
            result = None if self.lost.agree() else result
            if result:
                figures, weight = result
                if weight:
                    self.checkpoints.losses[step] = figures["loss"]
                self.log.evaluation(step, figures, weight)
        return result

    def vote_now(self, state, step: int) -> dict[str, float]:
        """Have the answers to all that is held out vote, where they can; write and return what that comes to."""
        with self.clock.within("evaluation"):
            figures = vote_and_keep(
                self.run, self.evaluated(state), self.corpus, self.workdir, step,
                on_batch=lambda: self.clock.enter("evaluation"),
            )  # fmt: skip
        if figures:
            self.log.writer.write("votes", step=step, **figures)
        return figures

    def evaluate_or_stop(self, state, step: int) -> None:
        """Evaluate during the run; a stop meanwhile saves here, so that going on begins with this evaluation.

        Raises Interrupted where it was stopped, DataGone where held-out documents cannot be read any more.
        """
        if self.evaluate_now(state, step, self.config.evaluation.batches, self.signals.agreed) is None:
            self.save(state, step, ends=True)
            raise self.lost.stopped(step)

    def close(self, state) -> list[str]:
        """Evaluate all held-out documents, draw a sample, and print and return the summary."""
        lines, corpus, workdir, step = [""], self.corpus, self.checkpoints.address, self.config.train.steps
        if corpus:
            self.log.display.phase("evaluating all that is held out")
            result = self.evaluate_now(state, step, None, lambda: False)
            if result is None:
                raise self.lost.stopped(step)
            lines += heldout_lines(self.run, *result, corpus)
            lines += vote_lines(self.vote_now(state, step), corpus)
        speed = self.log.average_tokens_per_second()
        lines.append(f"speed: {speed:,.0f} tokens/s over {self.log.total_tokens:,} tokens")
        lines.append(self.log.goodput.line())
        lines.append(f"checkpoint: {workdir}/checkpoints/{step}")
        if corpus and corpus.tokenizer and self.config.evaluation.sample_tokens:
            asked = "--message=Hello"
            if not corpus.is_of_conversations:
                asked = f"--prompt={shlex.quote(opening(corpus))}"
                with self.clock.within("evaluation"):
                    lines += sample_lines(self.run, self.evaluated(state), corpus)
            lines.append(f"next: .venv/bin/python generate.py --workdir={workdir} {asked} --max_tokens=64")
        self.log.display.lines(lines)
        return lines

    def go_back(self, trouble: step_log.Diverged) -> dict | None:
        """Return the record of the checkpoint to go back to, None for the beginning, having left out the bad batches.

        Raises NonFinite where it was done too often, or the batches are from elsewhere and come but once.
        """
        # What was skipped before a restart has been used up; today's batch size says nothing of it.
        first, last = (self.taken_before(step) for step in (trouble.first_step, trouble.last_step + 1))
        if self.roll_backs >= self.config.train.roll_backs or not self.corpus:
            raise NonFinite(
                f"{trouble} at step {trouble.last_step}, after going back {self.roll_backs} times; "
                f"nothing bad was saved; {self.keep_bad_documents(trouble)}"
                "use a lower --config.optimizer.learning_rate in a new --workdir"
            )
        self.roll_backs += 1
        self.checkpoints.wait()
        record = self._take_up()
        if record and trouble.first_step <= record["step"] + 1:  # no update was taken from this checkpoint on
            if record["step"] == self.suspect:  # nor with other batches, so it is the checkpoint that is bad
                self.checkpoints.set_aside(self.suspect, "is not used: no step after it had a finite gradient")
                record = self._take_up()
            else:
                self.suspect = record["step"]
        if record:  # a checkpoint may lie among the steps that were skipped
            first = max(first, record["examples"])
        self.corpus = dataclasses.replace(self.corpus, train=self.corpus.train.skip(first, last))
        self.log.goodput.lost_since(record["goodput"]["parts"]["training"] if record else 0.0)
        step = record["step"] if record else 0
        self.log.event(
            f"{trouble}; back to step {step}, leaving out {last - first} examples up to step "
            f"{trouble.last_step}'s", "roll_back", step,
            first_step=trouble.first_step, last_step=trouble.last_step,
        )  # fmt: skip
        return record

    def _take_up(self) -> dict | None:
        """Return the record of the newest good checkpoint, None if there is none, and count on from there."""
        step = self.checkpoints.newest() if self.checkpoints.steps() else None
        record = self.checkpoints.record(step) if step is not None else None
        self.checkpoints.losses = losses_of(record)
        self.log.go_on(record)
        return record

    def keep_bad_documents(self, trouble: step_log.Diverged) -> str:
        """Write down what the bad batches were made of; return where, as a part of a sentence."""
        if not self.corpus:
            return ""
        path, steps = self.workdir / "bad_documents.txt", range(trouble.first_step, trouble.last_step + 1)
        try:
            if processes.index() == 0:
                lines = inspection.documents_of(self.config, self.workdir, steps)
                workdirs.write_atomically(path, "\n".join(lines).encode())
        except (OSError, DataError) as error:
            return f"the documents of the bad batches could not be written down ({error}); "
        return f"the documents of the bad batches are in {path}: mend them, or "


def place_of(record: dict | None) -> tuple[int, int, int]:
    """Return (steps, examples, increases of the batch) of a checkpoint's record; None: of the beginning."""
    return (record["step"], record["examples"], record.get("increases", 0)) if record else (0, 0, 0)


def digest(corpus: corpora.Corpus | None) -> str:
    """Return what identifies the data of a run; batches from elsewhere have no name."""
    return corpus.digest if corpus else ""


def losses_of(record: dict | None) -> dict[int, float]:
    """Return the held-out losses of the checkpoints before, by step."""
    return {int(step): loss for step, loss in record["losses"].items()} if record else {}
