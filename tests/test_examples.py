# SPDX-License-Identifier: Apache-2.0
"""Examples as a newcomer runs them: real processes, on simulated chips."""

import json
import os
import re

import numpy as np
import pytest

import trained_run
from configs.base import get_config
from examples import conversations, plot_run
from input_pipeline.corpus import prepare
from input_pipeline.synthetic import MarkovWindows
from tests import warm
from tests.pods.local_pods import LocalPod, wait_until

MEASURED = re.compile(r"step=(\d+) loss=([\d.]+) step_time_ms=([\d.,]+) tokens_per_second=([\d,]+)")
EVALUATED = re.compile(
    r"eval_loss=([\d.]+) accuracy=([\d.]+) perplexity=([\d.]+) eval_time_ms=([\d.]+) parameters=([\d,]+)"
)
QUICKLY_COMPILED = (
    "--config.model.num_layers=1", "--config.model.remat=none", "--config.train.loss_chunk_tokens=0",
    "--config.optimizer.name=sgd", "--config.optimizer.schedule=constant", "--config.optimizer.clip_norm=0",
    "--config.optimizer.learning_rate=0.1",
)  # fmt: skip


@pytest.mark.slow
def test_the_example_of_a_v4_32_learns_its_batch(tmp_path):
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": " ".join(flags)}
    environment |= {"TPU_MESH_CONFIG": ""} | {"TMPDIR": str(tmp_path), "JAX_PLATFORMS": "tpu"}
    program = "import runpy; runpy.run_module('examples.tpu_v4_32_training', run_name='__main__', alter_sys=True)"
    keys = ("--config.model.dtype=float32", "--config.model.vocab_size=16")  # so that few answers depend on rounding
    words = ["-c", program, "--synthetic", "--steps=5", f"--workdir={tmp_path / 'run'}", *keys]
    process = warm.start(words, environment)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    lines = ("Local devices: 16", "Global devices: 16", "Process index: 0", "Process count: 1")
    assert all(line in out for line in lines) and "Mesh: data=4 * model=2 * fsdp=2" in out
    measured = [tuple(float(text.replace(",", "")) for text in found) for found in MEASURED.findall(out)]
    steps, losses, milliseconds, speeds = zip(*measured, strict=True)
    assert steps == (1, 2, 3, 4, 5)
    assert list(losses) == sorted(set(losses), reverse=True)
    assert min(milliseconds) > 0 and min(speeds) > 0
    assert (tmp_path / "run" / "logs" / "train_worker_0.out").is_file()
    assert (tmp_path / "run" / "checkpoints" / "5").is_dir()
    assert re.findall(r"step (\d)/5  loss", (tmp_path / "training.log").read_text()) == list("12345")
    check_evaluation(EVALUATED.search(out), trained_run.open_run(tmp_path / "run"))


def check_evaluation(printed: re.Match, run: trained_run.TrainedRun) -> None:
    """Compare it with that of the checkpoint on one device, on every 64th row of the held-out synthetic stream."""
    rows = MarkovWindows(16, seed=0, num_tokens=1 << 18, stream="heldout").read(64 * np.arange(64), 64)
    logits, targets = run.logits(rows["tokens"]).astype(np.float64), rows["targets"]
    likelihoods = np.take_along_axis(logits, targets[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
    loss, accuracy, perplexity, milliseconds = map(float, printed.groups()[:4])
    assert loss == pytest.approx(-likelihoods.mean(), abs=2e-4)
    assert perplexity == pytest.approx(np.exp(-likelihoods.mean()), rel=1e-3)
    assert accuracy == pytest.approx((logits.argmax(-1) == targets).mean(), abs=2e-3) and accuracy > 0.02
    assert milliseconds > 0 and int(printed[5].replace(",", "")) == run.run.models.num_parameters


@pytest.mark.slow
def test_the_example_runs_on_all_hosts_of_a_pod(tmp_path):
    """As process group of two, eight simulated chips each."""
    pod = LocalPod(tmp_path, ACCEL="v4-32", TMPDIR=str(tmp_path))
    try:
        assert pod.run("create", "--workers=2").status == 0
        workdir = f"--workdir={pod.folder}/shared/example"
        example = ("python", "-m", "examples.tpu_v4_32_training", "--synthetic", "--steps=3", workdir)
        assert pod.run("launch", "--", *example, *QUICKLY_COMPILED).status == 0
        codes = [pod.code_of(worker) for worker in range(2)]
        wait_until(lambda: all((code / "run.status").exists() for code in codes), "the example to end", 240)
    finally:
        pod.end()
    assert [(code / "run.status").read_text().strip() for code in codes] == ["0"] * 2, pod.log(0)
    for worker in range(2):
        for line in ("Local devices: 8", "Global devices: 16", f"Process index: {worker}", "Process count: 2"):
            assert line in pod.log(worker)
    losses = [float(loss) for _, loss, *_ in MEASURED.findall(pod.log(0))]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    assert len(EVALUATED.findall(pod.log(0))) == 1 and not EVALUATED.search(pod.log(1))
    steps = re.findall(r"step (\d)/3  loss", (tmp_path / "training.log").read_text())  # of both hosts, in one folder
    assert sorted(steps) == list("112233")


def test_the_conversations_made_up_are_read(tmp_path):
    conversations.main(tmp_path)
    data = get_config().data
    data.update(tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    for source, name in (("chat", "talks"), ("preferences", "pairs")):
        data.update(source=source, path=str(tmp_path / f"{name}.jsonl"))
        ready = prepare(data, vocab_size=256, vocab_size_typed=False, announce=lambda line: None)
        assert ready.heldout.num_documents > 100 and ready.train.parts[0].num_documents > 2000


def test_a_run_that_was_taken_up_again_is_drawn_as_one_history(tmp_path):
    figures = {"loss": 2.0, "tokens_per_second": 10.0, "total_tokens": 30, "goodput": 0.5}
    steps = [1, 2, 3, 2, 3]  # stopped after the third, which was not saved
    lines = [{"kind": "train", "step": step, "number": number} | figures for number, step in enumerate(steps)]
    lines.append({"kind": "eval", "step": 2, "eval_loss": 2.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["number"] for line in plot_run.lines_of(tmp_path, "train")] == [0, 3, 4]
    plot_run.main(tmp_path, tmp_path / "run.svg")
    assert "goodput" in (tmp_path / "run.svg").read_text()


def test_a_plot_is_written_where_it_says(tmp_path, capsys):
    """Without a suffix it is a PNG; a dollar in the name of a run begins no formula."""
    run = tmp_path / "a$x_$b"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 2.0, "tokens_per_second": 9.0}))
    plot_run.main(run, tmp_path / "picture")
    file = tmp_path / "picture.png"
    assert file.stat().st_size > 1000 and capsys.readouterr().out.rstrip().endswith(f"in {file}")
