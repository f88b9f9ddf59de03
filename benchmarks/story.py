# SPDX-License-Identifier: Apache-2.0
"""Does everything work together? One run goes from own texts to a served, exported and reported model.

python benchmarks/story.py --keep=FOLDER --pod

Each stage is a command that a user would type, and checks what it promises; docs/story.md tells the same by hand. A
stage that fails is named, with its last lines. With --keep, stages that are done are passed over in the next call.
--pod adds the training on a local pod of 4 real processes.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

import faults
import local_pod
import support

from tests.pods.local_pods import LocalPod

KEYS = faults.KEYS | {
    "model.dtype": "float32", "model.max_length": 128, "train.sequence_length": 128, "data.tokenizer": "sentencepiece",
    "train.hang_seconds": 0, "train.global_batch": 16,
}  # fmt: skip
STEPS, INTERRUPTED_AT, KILLED_AT = 30, 8, 18  # checkpoints are saved every 5 steps
MESH = {"mesh.data": 2, "mesh.fsdp": 4, "mesh.model": 2}  # of the 16 chips; it begins with fsdp=16
SAME_LOSS = 1e-3  # relative difference of the last losses on two meshes
SAME_LOGITS = 1e-4
LIMIT_SECONDS = 1800  # of a command
QUESTIONS = (
    {"question": "4 is 2 times", "choices": ["2", "nothing"], "answer": 0},
    {"prompt": "6 is 3 times ", "exact": "2"},
    {"text": "10 is 5 times 2; 15 is 5 times 3;"},
)
SPACE = 'from configs.space import Range\n\nSPACE = {"optimizer.learning_rate": Range(1e-4, 1e-2, log=True)}\n'


class StageFailed(Exception):
    """A command ended otherwise than it should, or a promise was broken."""


@dataclasses.dataclass(frozen=True)
class Story:
    """The folder of the story, and how long its runs are."""

    place: pathlib.Path
    short: bool

    def run(self, name: str) -> pathlib.Path:
        """Return the folder of a run."""
        return self.place / "runs" / name

    def figure(self, stage: str, name: str) -> float:
        """Return a figure of a stage that is done."""
        return json.loads((self.place / "done.json").read_text())[stage][name]

    def steps(self, usual: int) -> int:
        """Return the steps of a run that is to learn; with --quick it only starts to."""
        return max(10, usual // 10) if self.short else usual

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the commands: caches of their own, and the quick compilation of the tests."""
        return os.environ | {
            "XDG_CACHE_HOME": str(self.place / "cache"),
            "XLA_FLAGS": support.QUICK_COMPILATION,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def call(self, program: str, *words: str, status: int = 0) -> str:
        """Run a command, and return its output.

        Raises:
          StageFailed: it ended with another status.
        """
        command = [sys.executable, program, *words]
        done = subprocess.run(
            command, cwd=support.ROOT, env=self.environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        if done.returncode != status:
            raise StageFailed(f"{program} ended with status {done.returncode}, not {status}: {done.stderr[-1500:]}")
        return done.stdout + done.stderr

    def copy(self, name: str, new: str) -> pathlib.Path:
        """Copy a run, so that a stage that failed can begin again; return the folder of the copy."""
        shutil.rmtree(self.run(new), ignore_errors=True)
        return shutil.copytree(self.run(name), self.run(new))

    def train(self, name: str, *words: str, status: int = 0, **keys) -> str:
        """Train a run; `keys` have __ for the dot."""
        typed = support.typed({key.replace("__", "."): value for key, value in keys.items()})
        return self.call("train.py", f"--workdir={self.run(name)}", *words, *typed, status=status)

    def pretrain(self, name: str, *, injected: str = "", mesh: dict | None = None, status: int = 0) -> str:
        """Train on the own texts on a simulated v4-32."""
        keys = KEYS | {"data.path": f"{self.place}/texts/*.txt", "train.steps": STEPS} | (mesh or {})
        faults = [f"--faults={injected}"] if injected else []
        return self.train(name, "--topology=v4-32", *faults, status=status, **keys)


def check(holds: bool, promise: str) -> None:
    """Raise StageFailed if a promise does not hold."""
    if not holds:
        raise StageFailed(f"broken: {promise}")


def losses(run: pathlib.Path) -> dict[int, float]:
    """Return the last loss of each step."""
    return {line["step"]: line["loss"] for line in support.lines_of(run, "train")}


def fell(run: pathlib.Path) -> dict:
    """Return the first and the last loss of a run that has learned something."""
    found = losses(run)
    first, last = found[min(found)], found[max(found)]
    check(last < first, f"the loss of {run.name} falls, from {first} to {last}")
    return {"first_loss": round(first, 4), "last_loss": round(last, 4)}


def texts(story: Story) -> dict:
    """Write the texts, the conversations and the questions."""
    if not (story.place / "texts").exists():
        support.write_texts(story.place)
    story.call("examples/conversations.py", str(story.place / "talks"))
    (story.place / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return {"texts": len(list((story.place / "texts").iterdir()))}


def interrupted(story: Story) -> dict:
    """Make tokenizer and shards, train on a simulated v4-32, and be interrupted as by a preemption."""
    shutil.rmtree(story.run("interrupted"), ignore_errors=True)
    said = story.pretrain("interrupted", injected=f"sigterm@{INTERRUPTED_AT}", status=75)
    check(f"saved at step {INTERRUPTED_AT}" in said, "an interrupted run saves")
    check((story.run("interrupted") / "tokenizer.model").exists(), "a tokenizer is trained")
    check(any((story.place / "cache").rglob("shards/*")), "the texts are stored in shards")
    check("SIMULATION" in said and "16 simulated" in said, "the v4-32 is simulated")
    return {"saved_at_step": INTERRUPTED_AT}


def killed(story: Story) -> dict:
    """Continue, be killed, and lose a bit of the newest checkpoint."""
    run = story.copy("interrupted", "killed")
    story.pretrain("killed", injected=f"kill@{KILLED_AT}", status=-signal.SIGKILL)
    kept, steps = support.checkpoints(run), support.steps_of(run)
    check(steps == list(range(1, len(steps) + 1)), f"no step is lost or repeated by the preemption: {steps}")
    check(len(kept) > 1, f"there are older checkpoints: {kept}")
    faults.flip_a_bit_of_the_newest(run)
    return {"killed_at_step": KILLED_AT, "damaged_checkpoint": kept[-1], "good_checkpoint": kept[-2]}


def resumed(story: Story) -> dict:
    """Continue on another mesh from the last good checkpoint, to the end; compare it with an undisturbed run."""
    before = len(support.steps_of(story.copy("killed", "base")))
    damaged, good = (story.figure("killed", f"{which}_checkpoint") for which in ("damaged", "good"))
    said = story.pretrain("base", mesh=MESH)
    check(f"checkpoint {damaged} is damaged" in said, "the damaged checkpoint is named")
    steps = support.steps_of(story.run("base"))[before:]
    check(steps == list(range(good + 1, STEPS + 1)), f"it continues after step {good}, to step {STEPS}: {steps}")
    story.pretrain("undisturbed")
    one, other = losses(story.run("base")), losses(story.run("undisturbed"))
    worst = max(abs(one[step] / other[step] - 1) for step in other)
    check(one.keys() == other.keys() and worst < SAME_LOSS, f"its losses are those of an undisturbed run: {worst:.1e}")
    return fell(story.run("base")) | {"largest_difference_of_losses": float(f"{worst:.1e}")}


def tuned(story: Story) -> dict:
    """Fine-tune on conversations."""
    said = story.train(
        "chat", train__init_from=story.run("base"), data__source="chat", data__path=story.place / "talks/talks.jsonl",
        train__steps=story.steps(300), optimizer__learning_rate=0.003,
    )  # fmt: skip
    return fell(story.run("chat")) | {"parameters": parameters_of(said)}


def distilled(story: Story) -> dict:
    """Teach a model with half the width."""
    keys = KEYS | {
        "model.embed_dim": 32, "model.mlp_dim": 64, "train.objective": "distillation",
        "distillation.teacher": story.run("chat"), "data.tokenizer": story.run("chat") / "tokenizer.model",
        "data.source": "chat", "data.path": story.place / "talks/talks.jsonl", "train.steps": story.steps(300),
        "optimizer.learning_rate": 0.01,
    }  # fmt: skip
    said = story.train("student", **keys)
    size, teacher = parameters_of(said), story.figure("tuned", "parameters")
    check(size < teacher, f"the student is smaller: {size:,} of {teacher:,} parameters")
    return fell(story.run("student")) | {"parameters": size}


def parameters_of(said: str) -> int:
    """Return the number of parameters that a run printed."""
    return int(re.findall(r"Parameters: ([\d,]+)", said)[-1].replace(",", ""))


def scored(story: Story) -> dict:
    """Score the student on the questions."""
    story.call("score.py", f"--workdir={story.run('student')}", f"--questions={story.place}/questions.jsonl")
    items = [json.loads(line) for line in (story.run("student") / "scores.jsonl").read_text().splitlines()]
    check(len(items) == len(QUESTIONS), f"each question has a result: {items}")
    return {"items": len(items)}


def asked(story: Story) -> dict:
    """Serve the student, and ask it with the client of OpenAI: the stream is the answer, and the greedy one is one."""
    import openai

    question = [{"role": "user", "content": "What comes after 41?"}]
    fail = functools.partial(check, False)
    with (
        support.served(story.run("student"), "--rows=2", environment=story.environment, fail=fail) as (_, address),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        how = {"model": "student", "messages": question, "max_tokens": 12, "temperature": 0}
        answer = client.chat.completions.create(**how)
        parts = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**how, stream=True)]
        names = [model.id for model in client.models.list()]
    said = answer.choices[0].message.content
    check(names == ["student"], f"the server names its model: {names}")
    check("".join(parts) == said, f"the stream is the answer: {parts} and {said!r}")
    check(answer.usage.completion_tokens > 0, "tokens are counted")
    return {"answer": said, "answer_tokens": answer.usage.completion_tokens}


def exported(story: Story) -> dict:
    """Export to the format of Hugging Face, and read it back with safetensors and with transformers."""
    import safetensors.numpy
    import torch
    import transformers

    folder, tokens = story.place / "exported", np.arange(48, dtype=np.int32).reshape(2, 24) + 3
    run = f"--workdir={story.run('chat')}"
    story.call("convert.py", "export", run, f"--hf={folder}")
    np.save(story.place / "in.npy", tokens)
    story.call("convert.py", "logits", run, f"--tokens={story.place}/in.npy", f"--out={story.place}/out.npy")
    ours = np.load(story.place / "out.npy", allow_pickle=False)
    tensors = {k: v for file in folder.glob("*.safetensors") for k, v in safetensors.numpy.load_file(file).items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    difference = float(np.abs(theirs - ours).max())
    check(difference < SAME_LOGITS, f"transformers computes the same logits, up to {difference:.1e}")
    size, of_run = sum(tensor.size for tensor in tensors.values()), story.figure("tuned", "parameters")
    check(size == of_run, f"safetensors finds {size:,} of {of_run:,} parameters")
    return {"tensors": len(tensors), "largest_difference_of_logits": float(f"{difference:.1e}")}


def studied(story: Story) -> dict:
    """Run a study over one key, the learning rate."""
    (story.place / "space.py").write_text(SPACE)
    trials = 2 if story.short else 4
    keys = KEYS | {"data.path": f"{story.place}/texts/*.txt", "train.steps": 10}
    del keys["optimizer.learning_rate"]
    said = story.call(
        "sweep.py", "search", "--config=configs/tiny.py", f"--space={story.place}/space.py", f"--trials={trials}",
        "--name=story", f"--storage=sqlite:///{story.place}/studies.db", f"--root={story.place}/study",
        *support.typed(keys),
    )  # fmt: skip
    check(f"story: {trials} done, 0 pruned, 0 failed" in said, f"all {trials} trials end: {said[-500:]}")
    return {"trials": trials}


def reported(story: Story) -> dict:
    """Write a page about all runs."""
    names = ["base", "undisturbed", "chat", "student"]
    page = story.place / "report.html"
    story.call("report.py", *(str(story.run(name)) for name in names), f"--html={page}")
    html = page.read_text()
    check(all(name in html for name in names), "the report names each run")
    check("<svg" in html and "http://" not in html.replace("http://www.w3.org", ""), "it has plots, and loads nothing")
    return {"report_kib": round(len(html) / 1024)}


def on_a_pod(story: Story) -> dict:
    """Train with 4 processes by pod.py; stop them, damage the newest checkpoint, and restart."""
    pod = LocalPod(story.place, ACCEL="v4-32")
    pod.environment = story.environment | pod.variables
    run = pod.folder / "shared" / "tiny"
    keys = KEYS | {"data.path": f"{story.place}/texts/*.txt", "train.steps": 100_000, "checkpoint.keep": 3}
    local_pod.call(pod, "create")
    try:
        local_pod.call(pod, "launch", "--config=configs/tiny.py", *support.typed(keys))
        local_pod.wait_for_step(run, 12)
        local_pod.call(pod, "stop")
        kept, before = support.checkpoints(run), support.steps_of(run)
        check(kept[-1] == before[-1], "the pod saves its last step when it is stopped")
        faults.flip_a_bit_of_the_newest(run)
        local_pod.call(pod, "restart")
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(support.steps_of(run)) == len(before):
            check(time.monotonic() < deadline, "the pod trains again")
            time.sleep(0.2)
        local_pod.call(pod, "stop")
        went_on = support.steps_of(run)[len(before)]
        check(went_on == kept[-2] + 1, f"it continues after checkpoint {kept[-2]}, at step {went_on}")
    finally:
        local_pod.call(pod, "delete")
    return {"pod_damaged_checkpoint": kept[-1], "pod_continued_at_step": went_on}


STAGES: tuple[Callable[[Story], dict], ...] = (
    texts, interrupted, killed, resumed, tuned, distilled, scored, asked, exported, studied, reported,
)  # fmt: skip


def tell(story: Story, stages: tuple[Callable[[Story], dict], ...]) -> dict:
    """Do the stages that are not done; return the figures and seconds of all. The first failure ends the story."""
    file = story.place / "done.json"
    done = json.loads(file.read_text()) if file.exists() else {}
    for number, stage in enumerate(stages, start=1):
        name, what = stage.__name__, stage.__doc__.splitlines()[0]
        if name in done:
            print(f"{number}. {name}: done before", flush=True)
            continue
        print(f"{number}. {name}: {what}", flush=True)
        began = time.perf_counter()
        try:
            figures = stage(story)
        except (StageFailed, subprocess.TimeoutExpired) as error:
            sys.exit(f"error: stage {name}: {error}")
        done[name] = figures | {"seconds": round(time.perf_counter() - began)}
        print(f"   {json.dumps(done[name])}", flush=True)
        file.write_text(json.dumps(done))
    return done


def main() -> None:
    """Tell the story in a folder."""
    parser = support.Parser(__doc__)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="where stages that are done are kept")
    parser.add_argument("--pod", action="store_true", help="also train on a local pod of 4 processes")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, where a model is to learn")
    options = parser.parse_args()
    with contextlib.nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder).absolute()
        place.mkdir(parents=True, exist_ok=True)
        done = tell(Story(place, options.quick), STAGES + ((on_a_pod,) if options.pod else ()))
    figures = {f"{name} {figure}": value for name, found in done.items() for figure, value in found.items()}
    seconds = sum(found["seconds"] for found in done.values())
    support.finish("story", figures | {"minutes": math.ceil(seconds / 60)})


if __name__ == "__main__":
    main()
