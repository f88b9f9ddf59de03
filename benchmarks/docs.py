# SPDX-License-Identifier: Apache-2.0
"""Does every command of README.md, docs/, WORKSPACE.md, the docstrings and `make help` work?

python benchmarks/docs.py README.md docs/data.md --keep=FOLDER

The commands are read from the pages, and those of a page run in their order in one copy of the tree. Runs are shortened
by keys that the page does not set. What cannot run here is in the table NOT_HERE with its reason, and pod.py's dry run
stands in for it. Without names, all pages are run. With --keep, finished pages are passed over in the next call.
Status 1: a command failed.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np

import pages
import support

SHORT_RUN = {
    "train.steps": 3, "train.eval_every": 0, "evaluation.batches": 1, "train.global_batch": 64,
    "train.sequence_length": 64, "model.num_layers": 1, "model.embed_dim": 64, "model.mlp_dim": 128,
}  # fmt: skip
OF_TPU_OPTIMIZED = {"model.embed_dim": 192, "train.global_batch": 256}  # its 12 heads and first batch
MOST_STEPS = 50  # where the page itself sets them
SHORTER = {  # program: what it gets in addition, unless it is there
    "rehearse": ("--advice_seconds=0", "--config.model.num_layers=2"),
    "sweep run": ("--config.train.steps=3", "--config.data.puzzle_count=16", "--config.data.puzzle_heldout=4"),
    "sweep search": (
        "--trials=2",
        "--config.train.steps=3",
        "--config.train.global_batch=16",
        "--config.train.sequence_length=64",
        "--config.evaluation.batches=1",
    ),
}
SERVES = {"serve.py": 8000, "tensorboard": 6006}  # program: where it listens until it is stopped
LIMIT_SECONDS = 1200  # of a command
CLOUD, HUB, POD, INSTALLS, OWN_DATA = (
    "needs a cloud account", "needs a model hub", "needs a pod of TPUs", "installs packages from an index",
    "needs data or weights that are published elsewhere",
)  # fmt: skip
WORD, LONG, GIVEN = "a name in a sentence", "takes hours; run it by itself", "its words stand for the user's own"
CHANGES = "deletes or rewrites files that the next commands need"
# What is not run: a pattern found in the command, and the reason. The first row that matches decides.
NOT_HERE = (
    (r"transport=local", ""),
    (r"gs://|gcloud|^exit$|git clone|kubectl|update_experiment_gcs_paths", CLOUD),
    (r"run_experiment\.py \w+ --dry-run$", ""),
    (r"scripts/gcloud_|pod\.py (?!help)|run_experiment\.py|deploy_optimizations", POD),
    (r"^pip |^uv |\bpip |-m venv|EXTRAS=|ACCELERATOR=|PYTHON=|make lock|make lint$", INSTALLS),
    (r"--config\.logging\.wandb=true|meta-llama/|ORG/NAME|FOLDER_OR_NAME|data\.source=huggingface", HUB),
    (r"FOLDER_WITH_|--trm=|--core=|--include_path|reasoning_gym|xprof|search_then_train", OWN_DATA),
    (r"make (test|bench|reasoning)\b|benchmarks/|pretrain_jax\.py --|rehearse.*--search", LONG),
    (r"make (clean|format)\b", CHANGES),
    (r"exp08-ema --workers|workdir=runs/sudoku\b", LONG),
    (r"(?<![A-Z_])(NAME|GROUP|SUBCOMMAND|COMMAND|RECIPE|FILE|FOLDER|WORKDIR)(?![A-Z_=])|_step=N\b", GIVEN),
    (r"rehearse(?!.*(TOPOLOGY|topology|compare)=)", GIVEN),
    (r"make dashboard", "needs a database of studies"),
    (r"JAX_PLATFORMS=|-m examples\.tpu_v4_32|-m src\.train", "needs a TPU"),
)  # fmt: skip
NEEDS_ITS_CONTEXT = ("profiling.loop", "src.train.step_fn", "@reward", "import is_short", "def search(trained")
AS_THE_PAGE_SAYS = ((r'--faults="sigterm@', 75),)  # a pattern found in the command, and the status that it ends with
READS = re.compile(r"(?:--workdir|init_from|teacher)=(runs/[\w-]+)|\b(runs/[\w-]+)(?= |$)")
# Trains what is there already, as it was started.
CONTINUES = re.compile(r"train\.py --workdir=\S+(?![\s\S]*(--config=|init_from|config\.data\.))")
TRAINS_NOTHING = re.compile(r"--(evaluate_only|verify|explain_step|print_config)")
DRY = re.compile(r"(pod\.py [a-z_]+)")
A_POD = {"PROJECT": "my-project", "ZONE": "us-central2-b", "NAME": "my-pod", "BUCKET": "my-bucket", "REPO_URL": "URL"}


def why_not(shown: pages.Shown) -> str:
    """Return why a command is not run here, "" if it is run."""
    if shown.language == "python":
        return "a part of a program" if any(part in shown.text for part in NEEDS_ITS_CONTEXT) else ""
    if shown.page.startswith("docs/coming_from") and not shown.is_block and "--" not in shown.text:
        return WORD
    if not shown.is_block and not re.match(r"make |.*python\S* \S+ ?-?|.*python -", shown.text):
        return WORD
    return next((reason for pattern, reason in NOT_HERE if re.search(pattern, shown.text)), "")


def shortened(text: str) -> str:
    """Return a command with the keys that make its run short."""
    text = text if "<<" in text else re.sub(r"\s+# .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(explain_step=)\d+", r"\g<1>2", text)
    found = re.match(r"make (\w+)", text) or re.search(r"(\w+)\.py\b", text)
    program = found[1] if found else ""
    if CONTINUES.search(text):
        return text
    if program in ("train", "optimize_train_tpu") and not TRAINS_NOTHING.search(text):
        return _with(_few_steps(text), _keys_of_a_short_run(text))
    if program == "sweep":
        program = "sweep " + re.findall(r"sweep\.py (\w+)", text)[0]
        text = re.sub(r"(trials=)\d+", r"\g<1>2", text)
    return _with(text, SHORTER.get(program, ()))


def _few_steps(text: str) -> str:
    return re.sub(r"(train\.steps=)(\d+)", lambda at: f"{at[1]}{min(int(at[2]), MOST_STEPS)}", text)


def _keys_of_a_short_run(text: str) -> list[str]:
    """Return the keys of SHORT_RUN that suit what is trained: the sizes are those of a plain decoder."""
    from settings import loading

    recipe = (re.search(r"(?:CONFIG|--config)[= ](\S+\.py)", text) or ["", ""])[1]
    name = loading.load(recipe or "configs/tiny.py", "", {}).config.model.name
    others = ("configs/meta", "countdown")
    plain = name == "decoder_lm" and not any(other in recipe for other in others)
    keys = SHORT_RUN if plain else {key: SHORT_RUN[key] for key in ("train.steps", "train.eval_every")}
    if name == "trm":
        keys = keys | {"data.puzzle_heldout": 16}  # an evaluation of the default number takes many minutes
    if "init_from" in text and not recipe:  # it has the sizes of the run that it begins with
        keys = {key: value for key, value in keys.items() if not key.startswith(("model.", "train.sequence"))}
    if "tpu_optimized" in text:
        keys = keys | OF_TPU_OPTIMIZED
    if re.search("faults=|--profile", text):
        keys = keys | {"train.steps": MOST_STEPS + 10}  # so that what the page announces happens
    return support.typed(keys)


def _with(text: str, words) -> str:
    """Return a command with more words, in ARGS of make, without those whose flag or key is there."""
    new = " ".join(word for word in words if word.partition("=")[0] + "=" not in text)
    if not new:
        return text
    if not text.startswith("make "):
        ends = text.find(" &")
        return f"{text} {new}" if ends < 0 else f"{text[:ends]} {new}{text[ends:]}"
    return text[:-1] + f' {new}"' if 'ARGS="' in text else f'{text} ARGS="{new}"'


def make_clone(tree: pathlib.Path, prepared: pathlib.Path | None) -> None:
    """Make a copy of the tree with a user's own files, as a clone with one commit."""
    support.copy_tree(tree)
    (tree / ".venv").symlink_to((support.ROOT / ".venv").resolve())
    write_own_files(tree)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a clone"]):  # hosts of a pod check a commit out
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tree, check=True)
    if prepared:
        shutil.copytree(prepared / "Llama-3.2-1B", tree / "Llama-3.2-1B")


def write_own_files(tree: pathlib.Path) -> None:
    """Write the files that pages take as the user's own."""
    sentence = "{} {} has some words, and 12 of them are short.\n"
    for folder in ("my_texts", "new_texts", "texts", "other_texts", "code"):
        (tree / folder).mkdir()
        for number in range(20):
            suffix = "py" if folder == "code" else "txt"
            (tree / folder / f"{number}.{suffix}").write_text(sentence.format(folder, number) * 200)
    lines = "".join(
        json.dumps({"text": sentence.format("book", n) * 50, "body": "words " * 300}) + "\n" for n in range(40)
    )
    for name in ("books.jsonl", "heldout.jsonl"):
        (tree / name).write_text(lines)
    subprocess.run(["gzip", "-k", "books.jsonl"], cwd=tree, check=True)
    for name in ("a.txt", "b.txt", "my_text.txt"):
        (tree / name).write_text(sentence.format(name, 1) * 2000)
    questions = [{"question": "a or b", "choices": ["a", "b"], "answer": 0}, {"text": "for name in names:\n"}]
    (tree / "my_questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    for name in ("in.npy", "IN.npy"):
        np.save(tree / name, np.arange(32, dtype=np.int32).reshape(2, 16))
    digits = np.random.default_rng(0).integers(0, 17, (200, 64))
    (tree / "digits.csv").write_text("".join(",".join(map(str, [*digits[n], n % 10])) + "\n" for n in range(200)))


def prepare(folder: pathlib.Path) -> pathlib.Path:
    """Train the run that pages take for granted, once for all pages, and export it as a published model."""
    tree = folder / "prepared"
    if not (tree / "Llama-3.2-1B").exists():
        shutil.rmtree(tree, ignore_errors=True)
        make_clone(tree, None)
        for command in (
            ".venv/bin/python train.py --config=configs/tiny.py --workdir=runs/tiny",
            ".venv/bin/python convert.py export --workdir=runs/tiny --hf=Llama-3.2-1B/",
        ):
            subprocess.run(["bash", "-c", shortened(command)], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return tree


def give_runs(text: str, tree: pathlib.Path, prepared: pathlib.Path) -> None:
    """Copy the prepared run to where a command reads one that no earlier command has made."""
    begins = re.search(r"train\.py|make train", text) and not (TRAINS_NOTHING.search(text) or CONTINUES.search(text))
    for workdir, word in READS.findall(text):
        name = workdir or word
        is_new = (begins and f"workdir={name}" in text.lower()) or "import" in text
        if not is_new and not (tree / name).exists():
            shutil.copytree(prepared / "runs" / "tiny", tree / name)


@contextlib.contextmanager
def page_runner(tree: pathlib.Path, prepared: pathlib.Path) -> Iterator:
    """Yield a function (command) -> (status, output). Variables that a page sets hold until its end; servers end."""
    before, servers = [], []

    def run(shown: pages.Shown) -> tuple[int, str]:
        text = shown.text
        if shown.language == "python":
            give_runs(" ".join(re.findall(r"runs/tiny", text)), tree, prepared)
            return _finished([str(tree / ".venv/bin/python"), "-c", text], tree)
        if re.match(r"export |python=", text):
            before.append(text.partition(" #")[0])
            return 0, ""
        text = re.sub(r"^((?:[A-Z_]+=\S* )*)(\w+\.py )", r"\1.venv/bin/python \2", text)
        text = re.sub(r"^((?:[A-Z_]+=\S* )*)python[\d.]* ", r"\1.venv/bin/python ", text)
        give_runs(text, tree, prepared)
        text = "\n".join([*before, shortened(text) if not why_not(shown) else DRY.sub(r"\1 --dry_run", text)])
        port = next((port for program, port in SERVES.items() if program in text), 0)
        if not port or "EXTRAS" in text:
            return _finished(["bash", "-c", text], tree)
        while servers:
            _end(servers.pop())
        port = int((re.search(r"PORT=(\d+)", text) or [0, port])[1])
        if _answers(port):
            return 1, f"another program serves at port {port}"
        # In a session of its own, so that its shell ends with it.
        how = {"cwd": tree, "stdout": subprocess.DEVNULL, "start_new_session": True}
        servers.append(subprocess.Popen(["bash", "-c", text], **how))
        return _until_it_answers(servers[-1], port)

    try:
        yield run
    finally:
        for server in servers:
            _end(server)


def _finished(command: list[str], tree: pathlib.Path) -> tuple[int, str]:
    """Return the status and the end of the output; at a limit of time or a signal, what it started ends too."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tree, env=A_POD | os.environ, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return 124, f"not finished within {LIMIT_SECONDS} s"
    return process.returncode, out[-1500:] + err[-1500:]


def _until_it_answers(server: subprocess.Popen, port: int) -> tuple[int, str]:
    """Return when a request is answered; a server listens before it is ready."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        if _answers(port):
            return 0, ""
        time.sleep(0.5)
    return server.returncode or 124, f"nothing answers at port {port}"


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).close()
    except urllib.error.HTTPError:  # as of one that asks for a key
        return True
    except OSError:
        return False
    return True


def _end(server: subprocess.Popen) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
    server.wait(60)


def judge(shown: pages.Shown, run: Callable[[pages.Shown], tuple[int, str]]) -> tuple[str, str]:
    """Return the verdict on a command, and what it said if it failed."""
    reason = why_not(shown)
    is_dry = reason == POD and DRY.search(shown.text)
    if reason and not is_dry:
        return reason, ""
    expected = next((status for pattern, status in AS_THE_PAGE_SAYS if re.search(pattern, shown.text)), 0)
    status, said = run(shown)
    if status != expected:
        return f"failed with status {status}, not {expected}", said
    if is_dry:
        return f"{reason}; its dry run works", ""
    return f"works, with status {status} as the page says" if status else "works", ""


def run_page(page: str, folder: pathlib.Path) -> list[dict]:
    """Run the commands of a page; return a verdict for each."""
    tree, found = folder / "tree", []
    shutil.rmtree(tree, ignore_errors=True)
    prepared = prepare(folder)
    make_clone(tree, prepared)
    with page_runner(tree, prepared) as run:
        for shown in pages.commands(page):
            began = time.monotonic()
            verdict, said = judge(shown, run)
            line, seconds = " ".join(shown.text.split()), round(time.monotonic() - began, 1)
            print(f"{page}: {line[:160]}: {verdict} ({seconds} s)", *[said] * bool(said), sep="\n", flush=True)
            found.append({"command": line, "verdict": verdict, "seconds": seconds})
    return found


def main() -> None:
    """Run the named pages, or all; those whose verdicts are in --keep are passed over."""
    parser = support.Parser(__doc__)
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help=f"as README.md; or {pages.DOCSTRINGS!r}, {pages.HELP!r}"
    )
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="of the copies, and of verdicts so far")
    parser.add_argument("--quick", action="store_true", help="README.md alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are ended
    if unknown := [page for page in options.pages if page not in pages.names()]:
        support.usage_error(f"{unknown[0]} is not a page; the pages are {', '.join(pages.names())}")
    chosen = options.pages or (["README.md"] if options.quick else pages.names())
    with contextlib.nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory() as folder:
        verdicts = verdicts_of(chosen, pathlib.Path(folder).absolute())
    figures = {
        "pages": len(chosen),
        "commands": len(verdicts),
        "works": sum(verdict.startswith("works") for verdict in verdicts),
        "failed": sum(verdict.startswith("failed") for verdict in verdicts),
    }
    reasons = sorted({verdict for verdict in verdicts if not verdict.startswith(("works", "failed"))})
    support.finish("docs", figures | {f"not run: {reason}": verdicts.count(reason) for reason in reasons})
    sys.exit(figures["failed"] > 0)


def verdicts_of(chosen: list[str], folder: pathlib.Path) -> list[str]:
    """Return the verdicts of the commands of pages; each page's are kept in a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for page in chosen:
        file = folder / f"{re.sub(r'[/ .]', '_', page)}.json"
        if not file.exists():
            verdicts = run_page(page, folder)
            if not any(each["verdict"].startswith("failed") for each in verdicts):
                file.write_text(json.dumps(verdicts))
            found += verdicts
        else:
            found += json.loads(file.read_text())
    return [each["verdict"] for each in found]


if __name__ == "__main__":
    main()
