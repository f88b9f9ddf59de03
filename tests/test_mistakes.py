# SPDX-License-Identifier: Apache-2.0
"""What newcomers mistype, forget or break, by the commands themselves: each is one line that says what would work.

Each ends at once with status 2, and leaves nothing on disk. What stands in a run's folder and what no command line
reaches have their tests in the rooms; keys of the configuration have a table of their own in test_command_line.py.
"""

import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from settings import loading
from settings.keys import flat
from tests import warm
from tests.support import ROOT

RECIPE = """from configs import char
def get_config():
    config = char.get_config()
    config.model.update(num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1, mlp_dim=16)
    config.train.update(sequence_length=32, global_batch=4, steps=2)
    return config
"""
SUDOKUS = "--config=configs/trm/sudoku_mini.py --workdir=HERE/run --config.train.global_batch=8"
TRAIN, SOLVE = "train.py --config=HERE/small.py --workdir=HERE/run", "generate.py --workdir=HERE/solver --puzzle=HERE"
ONE = {"one.txt": "hello world\n"}
FEW = {f"texts/{number}.txt": f"the text of number {number} " * 9 for number in range(30)}

OF_A_RECIPE = "from configs import base\ndef get_config():\n    config = base.get_config()\n    config.train."
MISTAKES = [
    # configuration: what the table in test_command_line.py has not
    (f"{TRAIN} --config.data.path=", {}, "--config.data.path= has no value; give it one, or leave it out"),
    ("train.py --config=HERE/small.py --workdir=", {}, "--workdir= has no value"),
    ("train.py --config=", {}, "--config= has no value"),
    ("train.py --config=configs", {}, "--config=configs is a folder without a run (no config.json there) (looked in "),
    ("train.py --config=README.md", {}, "--config=README.md is not a Python file, as recipes are; configs/ has "),
    ("train.py --config=HERE/small.py", {"small.py": "def get_config():\n    pass\n"}, "get_config() must return"),
    ("train.py --config=HERE/small.py", {"small.py": OF_A_RECIPE + "steps = 1/0"}, "small.py, line 4: division by"),
    ("train.py --config=HERE/small.py", {"small.py": OF_A_RECIPE + "stpes = 5"}, "4: stpes is not a key; did you mean"),
    ("train.py --config=HERE/small.py", {"small.py": OF_A_RECIPE + "zzz = 5"}, "small.py, line 4: zzz is not a key"),
    ("train.py --config=HERE/small.py", {"small.py": OF_A_RECIPE + "steps = 'five'"}, "steps=five has type str"),
    ("report.py x --o=y", {}, "--o is not a flag; --help lists the flags"),
    ("train.py --config=configs/errors.py", {}, "--config=configs/errors.py: it has no get_config(), as recipes"),
    ("train.py \u2013workdir=x", {}, "'\u2013workdir=x' begins with a dash, not with hyphens; type --workdir=x"),
    ("pod.py describe \u2014zone=x", {}, "'\u2014zone=x' begins with a dash, not with hyphens; type --zone=x"),
    ("train.py configs/tiny.py", {}, "stray argument 'configs/tiny.py'; options are written --name=value"),
    ("train.py --explain_step=a:b", {}, "error: --explain_step=a:b is not a whole number"),
    ("generate.py --temperature=hot", {}, "error: --temperature=hot is not a number"),
    ("train.py --evaluate_only=maybe", {}, "error: --evaluate_only=maybe is not true or false"),
    ("generate.py --max_tokens=0", {}, "error: --max_tokens=0: 0 is not a positive integer"),
    (f"{TRAIN} --steps=5", {}, "--steps is not a flag; did you mean --config.train.steps"),
    (f"{TRAIN} --train.steps=5", {}, "--train.steps is not a flag; did you mean --config.train.steps"),
    ("train.py --workdir --config=HERE/small.py", {}, "--workdir has no value: --config=HERE/small.py follows it"),
    ("rehearse.py --topology=v4-8 --json --search", {}, "--json has no value: --search=same_batch follows it; write"),
    ("rehearse.py --compare=v4-8,v5e-8 --config.train.global_batch=3", {}, "global_batch=3 is not a multiple of its 4"),
    ("make -n dashboard STORAGE=nope.db", {}, "STORAGE=nope.db is not an address of a database; write STORAGE=sqlite"),
    ("make -n dashboard STORAGE=sqlite:///no.db", {}, "STORAGE=sqlite:///no.db: there is no such file; sweep.py"),
    (f"{TRAIN} --lr=1", {}, "did you mean --config.batch.learning_rate or --config."),
    (f"{TRAIN} --batch_size=8", {}, "--batch_size is not a flag; did you mean --config.train.global_batch"),
    (f"{TRAIN} --config.model.d_model=8", {}, "did you mean --config.model.embed_dim?"),
    (f"{TRAIN} --workdri=x", {}, "--workdri is not a flag; did you mean --workdir"),
    (f"{TRAIN} --config.optimizer.lr=1", {}, "did you mean --config.optimizer.learning_rate?"),
    (f"{TRAIN} --print_config --config.optimizer.name=adam", {}, "optimizer.name=adam is unknown; did you mean adamw"),
    (f"{TRAIN} --print_config --config.lora.alpha=2", {}, "lora.alpha=2.0 is not read with lora.rank=0; leave it out"),
    (f"{TRAIN} --config.model.positions=none", {}, "model.positions=none is not read with model.name=decoder_lm"),
    (f"{TRAIN} --config.supervision.label_smoothing=0.1", {}, "is not read with train.objective=language_modeling"),
    (f"{TRAIN} --faults=explode@3", {}, "--faults: 'explode@3' is not a fault; an example is sigterm@120"),
    ("train.py --explain_step=0", {}, "--explain_step=0: 0 is not a positive integer"),
    ("train.py --explain_step=1 --evaluate_only", {}, "--evaluate_only and --explain_step do not go together"),
    (f"{TRAIN} --evaluate_only --profile=1:2", {}, "--evaluate_only and --profile do not go together; give one"),
    (f"{TRAIN} --config.checkpoint.staging=HERE/file", {"file": ""}, "file is a file; name a folder that can be"),
    ("train.py --workdir=HERE/file/run", {"file": ""}, "file/run: HERE/file is a file; name a folder that"),
    ("rehearse.py --topology=v4-8 --config.data.source=documnts", {}, "error: data.source=documnts is unknown (all: "),
    ("rehearse.py --topology=v4-8 --json=", {}, "error: --json= has no value; add one, or omit the flag"),
    ("serve.py --workdir=HERE/decoder --api_key_file=", {}, "error: --api_key_file= has no value; add one"),
    ("score.py --workdir=HERE/decoder --questions=HERE/q.jsonl --results=HERE/q.jsonl", {"q.jsonl": '{"text": "a"}'},
     "q.jsonl is a file of --questions, and would replace it; name another"),
    ("report.py HERE --html=", {}, "error: --html= has no value; add one, or omit the flag"),
    ("train.py --config=~nobody-here/x.py", {}, "error: ~nobody-here/x.py: this system has no user with that home"),
    (f"report.py {'x' * 300}", {}, "a name in this path has over 255 bytes; is a quote missing?"),
    ("pod.py status --zone=a --project=b --pod_root=~nobody-here", {}, "this system has no user with that home folder"),
    ("generate.py --workdir=HERE/run --top_p=2", {}, "--top_p=2: 2.0 is not a number in the range [0.0, 1.0]"),
    ("generate.py --workdir=HERE/decoder --top_p=nan", {}, "--top_p=nan is not a number"),
    ("generate.py --workdir=HERE/decoder --message=hi", {}, "was not trained on conversations, and its tokenizer has"),
    ("generate.py --workdir=HERE/decoder --temperature=nan", {}, "--temperature=nan is not a number"),
    ("generate.py --workdir=HERE/run --temperature=inf", {}, "inf is not a number in the range [0.0, 1e+30]"),
    ("generate.py --workdir=HERE/run --temperature=-1", {}, "-1.0 is not a number in the range [0.0, 1e+30]"),
    ("generate.py --workdir=HERE/run --seed=9223372036854775808", {}, "08 is not an integer in the range [-922337203"),
    ("generate.py --workdir=HERE/decoder --stream --prompt=a --prompt=b", {}, "--stream prints one text while it is d"),
    ("generate.py --workdir=HERE/run --promt=x", {}, "--promt is not a flag; did you mean --prompt"),
    ("score.py --workdir=HERE/decoder", {}, "nothing to score; give --questions=FILE.jsonl"),
    ("score.py --workdir=HERE/solver --tasks=hellaswag", {}, "solver is a recursive model, which has no log-lik"),
    ("score.py --workdir=HERE/decoder --core=HERE/none", {}, "none/core.yaml: No such file or directory; name a "),
    ("score.py --workdir=HERE/decoder --questions=q --include_path=x", {}, "--include_path has definitions for --ta"),
    ("score.py --workdir=HERE/decoder --tasks=x --include_path=HERE/none", {}, "--include_path=HERE/none is not a f"),
    ("score.py --workdir=HERE/decoder --questions=HERE/none", {}, "none: No such file or directory; name a file with"),
    ("score.py --workdir=HERE/decoder --questions=HERE/q", {"q": '{"text": "a"}\n{"a": 1}\n'}, "q, line 2: has no key"),
    ("score.py --workdir=HERE/decoder --questions=HERE/q --results=HERE/none/r", {}, "r: the folder HERE/none does"),
    ("score.py --workdir=HERE/solver --questions=HERE/q", {}, "solver is a recursive model, which has no log-l"),
    ("explain.py --workdir=HERE/none --prompt=a --corrupt=b", {}, "HERE/none holds no run: there is no HERE/none/conf"),
    ("explain.py --workdir=HERE/solver --prompt=a --corrupt=b", {}, "solver is a recursive model, which does not cont"),
    ("explain.py --workdir=HERE/decoder --prompt=a", {}, "--corrupt is not given; --prompt and --corrupt are two"),
    ("explain.py --workdir=HERE/decoder --prompt=ab --corrupt=a", {}, "2 tokens (a|b) and --corrupt has 1 (a); choose"),
    ("explain.py --workdir=HERE/decoder --prompt=ab --corrupt=ab", {}, "--prompt and --corrupt are the same tokens;"),
    ("explain.py --workdir=HERE/decoder --prompt=a --corrupt=b --html=HERE/none/x", {}, "x: the folder HERE/none doe"),
    (f"{TRAIN} --config.causality.prompt=a", {}, "causality.prompt=a needs causality.corrupt (the text that it is com"),
    (f"{TRAIN} --config.causality.every=5", {}, "causality.every=5 needs causality.prompt (the text that is explained"),
    (f"{TRAIN} --config.evaluation.tasks=HERE/none", {}, "evaluation.tasks=HERE/none: No such file or directory; name"),
    (f"{TRAIN} --config.evaluation.tasks=HERE/q", {"q": '{"text": 1}'}, "q, line 1: text: should be a valid s"),
    (f"{TRAIN} --config.evaluation.tasks_every=5", {}, "evaluation.tasks_every=5 needs evaluation.tasks (the files of"),
    (f"{SUDOKUS.replace('--', 'train.py --', 1)} --config.evaluation.tasks=x", {}, "needs evaluation.tasks='', not x"),
    ("convert.py imprt --hf=x --workdir=HERE/run", {}, "convert.py imprt: the first argument must be import, ex"),
    ("convert.py --trm=x", {}, "must be import, export or logits"),
    ("convert.py import --workdir=HERE/run", {}, "needs one of --hf=FOLDER and --trm=FILE.safetensors"),
    ("convert.py import --hf=x", {}, "convert.py import --hf needs --workdir=FOLDER"),
    ("convert.py import --hf=x --workdir=HERE/run --tokens=x", {}, "--tokens is not read by this convert.py import"),
    ("convert.py import --hf=x --workdir=HERE/run --topology=v4-8", {}, "--topology is not read here: this command"),
    ("convert.py import --hf=x --workdir=HERE/run --config.model.dtype=float32", {}, "--config.model.dtype is not rea"),
    ("convert.py logits --workdir=HERE/run --hf=x", {}, "--hf is not read by this convert.py logits"),
    ("rehearse.py", {}, "--topology is not given; name one of cpu, cpu-8, v4-8"),
    ("rehearse.py --topology=v4-8 --search=fast", {}, "--search=fast: value should be one of"),
    ("rehearse.py --topology=v4-8 --search --scaling", {}, "--search and --scaling cannot be combined"),
    ("rehearse.py --compare=v4-8 --html=x.html", {}, "--html is for a single rehearsal"),
    ("rehearse.py --compare=v4-8 --advice_seconds=9", {}, "--advice_seconds is for a single rehearsal"),
    ("rehearse.py --topology=v4-8 --decode --search", {}, "--search and --decode cannot be combined"),
    ("rehearse.py --topology=v4-8 --decode --hlo=x", {}, "--hlo is for a single rehearsal; leave out --decode"),
    ("rehearse.py --topology=v4-8 --rows=8", {}, "--rows is for --decode; give both, or neither"),
    ("rehearse.py --topology=v4-8 --decode --rows=3 --config.mesh.fsdp=4", {}, "--rows=3 is not a multiple of the 4"),
    ("rehearse.py --topology=cpu-8 --decode", {}, "--topology=cpu-8: --decode is only for slices of TPUs"),
    ("rehearse.py --topology=v4-8 --decode --length=9999", {}, "--length=9999 exceeds model.max_length="),
    ("rehearse.py --config=configs/trm/sudoku.py --topology=v4-8 --decode", {}, "--decode is for language models"),
    ("rehearse.py --config=configs/digits.py --topology=v4-8 --decode", {}, "model.name=mlp_classifier has no cache"),
    ("rehearse.py --topology=v4-8 --scaling --config.mesh.model=2", {}, "--scaling chooses mesh.model itself; omit --"),
    ("rehearse.py --topology=v4-8 --scaling --config.model.num_heads=7", {}, "num_heads"),
    ("rehearse.py --topology=v4-8 --search=model --config=configs/digits.py", {}, "--search=model sizes a decoder_lm"),
    ("rehearse.py --topology=v4-8 --search=any_batch --config.train.global_batch=24", {}, "global_batch=24; change or"),
    ("benchmarks/run_all.py --text=x", {}, "--text=x is not read by every benchmark; name one"),
    ("benchmarks/same_programs.py --against=HERE/none nosuch", {}, "nosuch is not recorded; there are "),
    ("benchmarks/same_programs.py --against=HERE/none", {}, "HERE/none has no program to compare with; keep some "),
    ("rehearse.py --topology=v4-8 --compare=", {}, "--compare= has no value"),
    ("rehearse.py --compare=v4-8,", {}, "--compare needs topologies"),
    ("rehearse.py --topology=v4-8 --config.logging.alerts=https://x.y/z", {}, "--config.logging.alerts is a secret"),
    ("rehearse.py --topology=v4-8 --compare=v4-32", {}, "--compare names its topologies itself; leave out --topology"),
    ("rehearse.py --topology=v4-8 --compare", {}, "--compare has no value; write --compare=VALUE"),
    ("rehearse.py --topology=v4-8 --prove --price=2", {}, "leave out --price or --prove"),
    ("rehearse.py --topology=v4-8 --price=-1", {}, "--price=-1.0 must be 0 or greater"),
    ("rehearse.py --topology=v4-8 --price=nan", {}, "--price=nan must be 0 or greater"),
    ("rehearse.py --topology=v4-8 --advise_sharding=8,x", {}, "--advise_sharding: 'x' is not a whole number"),
    ("rehearse.py --topology=v4-8 --role=weights", {}, "--advise_sharding and --role need the sizes of a tensor"),
    ("rehearse.py --topology=v4-8 --workdir=x", {}, "--workdir is not read here"),
    ("rehearse.py --topology=v4-8 --processes=0", {}, "--processes=0: 0 is not a positive integer"),
    ("rehearse.py v4-8", {}, "stray argument 'v4-8'"),
    ("pod.py", {}, "no subcommand is given; use one of versions, create, wait, "),
    ("pod.py crate", {}, "crate is not a subcommand; did you mean create"),
    ("pod.py launch python train.py", {}, "write a command after --: pod.py launch -- python train.py"),
    ("pod.py launch --config=configs/smal.py", {}, "there is no recipe configs/smal.py; did you mean small"),
    ("sweep.py", {}, "no subcommand is given (all: plan, run, status, report, guide, folders, cancel, retry, search)"),
    ("sweep.py --workers=2 run exp08-ema", {}, "run comes before the flags, as the first word"),
    ("sweep.py statsu", {}, "statsu is not a subcommand; did you mean status?"),
    ("sweep.py run", {}, "run needs the name of a group or suite (all: trm)"),
    ("sweep.py run exp08-emma", {}, "exp08-emma is not a group or suite of configs/experiments/; did you mean exp08"),
    ("sweep.py run trm --base=minni", {}, "--base=minni is not a base of trm; did you mean mini?"),
    ("sweep.py plan trm --topology=v4-63", {}, "--topology=v4-63 is unknown; did you mean v4-64"),
    ("sweep.py plan trm --config.model.foo=1", {}, "--config.model.foo is not a configuration key"),
    ("sweep.py run trm more", {}, "stray argument 'more'; run takes one name"),
    ("sweep.py run trm --wrokers=2", {}, "--wrokers is not a flag; did you mean --workers"),
    ("sweep.py plan trm --price=-1", {}, "--price=-1.0 must be 0 or greater: dollars per chip-hour"),
    ("sweep.py plan trm --grant_days=0 --topology=v4-64", {}, "--grant_days=0.0 must be greater than 0: days"),
    ("sweep.py plan trm --grant_days=3", {}, "--grant_days needs the slice; add it, as --topology="),
    ("sweep.py plan trm --budget=3", {}, "--budget is not read by plan, but by run and status; omit it"),
    ("sweep.py run trm --keep=some", {}, "--keep=some: value should be one of <all|best|last|none>"),
    ("sweep.py run trm --workdir=x", {}, "--workdir is not read here: a study has its recipe"),
    (f"{TRAIN} --config.model.dtype=float16", {}, "model.dtype=float16 is refused: gradients below 6e-8 are 0 in it "),
    ("benchmarks/run_all.py layout", {}, "layout is not a benchmark; the benchmarks are ca"),
    ("benchmarks/run_all.py --quik layouts", {}, "--quik is not an option of a benchmark; there are --quick, "),
    ("benchmarks/run_all.py story layouts --pod", {}, "--pod is not an option of a benchmark; there are --quick, "),
    ("benchmarks/run_all.py story --pdo", {}, "unrecognized arguments: --pdo; --help lists the options"),
    ("benchmarks/layouts.py quick", {}, "quick is not an option of a benchmark"),
    ("benchmarks/record.py tiny", {}, "tiny is not recorded; there are "),
    ("make -n train TOPOLGY=v4-8", {}, "TOPOLGY is not a variable; they are ACCELERATOR ARGS CONFIG "),
    ("make -n train steps=5", {}, 'steps is not a variable; they are ACCELERATOR ARGS CONFIG EXTRAS'),
    ("make -n test ARGS='-x tests/nosuch tests/test_pod.py'", {}, "tests/nosuch does not exist"),
    ("make -n test-all ARGS=tests/nosuch.py::test_none", {}, "tests/nosuch.py::test_none does not exist"),
    ("make -n setup ACCELERATOR=tpus", {}, "ACCELERATOR=tpus is unknown: it is cpu, gpu or tpu"),
    ("make -n setup EXTRAS=torch", {}, "EXTRAS=torch is unknown; there are bench causality huggingface in"),
    # data
    (f"{TRAIN} --config.data.path=HERE/none", {}, "data path 'HERE/none': no such file or folder (current folder: "),
    (f"{TRAIN} --config.data.source=jsonl", {}, "data.path is empty; name a file, a folder, or a glob such as "),
    (f"{TRAIN} --config.data.path=HERE/no", {"no/.hidden": "x"}, "contains no files, except hidden ones"),
    (f"{TRAIN} --config.data.path=HERE/a.txt", {"a.txt": ""}, "a.txt' (data.source=auto): there is no text"),
    (f"{TRAIN} --config.data.path=HERE/a.png", {"a.png": b"\x89PNG"}, "a.png: not valid UTF-8 at byte 0 (line 1). F"),
    (f"{TRAIN} --config.data.path=HERE/a.jsonl", {"a.jsonl": '{"body": "x"}'}, "a.jsonl:1: without field 'text' (it h"),
    (f"{TRAIN} --config.data.path=HERE/a.jsonl", {"a.jsonl": '{"text": "x'}, "a.jsonl:1: not JSON at column 10"),
    (f"{TRAIN} --config.data.path=HERE/a.csv", {"a.csv": "id,body\n1,x\n"}, "a.csv:1: no column 'text'; it has 'id'"),
    (f"{TRAIN} --config.data.path=HERE/a.parquet", {"a.parquet": "x" * 9}, "; fix or remove it"),
    (f"{TRAIN} --config.data.path=HERE/texts --config.data.tokenizer=bpe", FEW, "bpe: No such file or directory; use "),
    (f"{TRAIN} --config.data.path=HERE/texts --config.data.tokenizer=HERE/small.py", FEW, "not a SentencePiece model;"),
    (f"{TRAIN} --config.data.path=HERE/texts --config.data.tokenizer=sentencepiece", FEW, "vocab_size=256 is too"),
    (f"{TRAIN} --config.data.path=HERE/texts --config.model.vocab_size=9", FEW, "is less than the 256 ids of data.tok"),
    (f"{TRAIN} --config.data.path=HERE/texts --config.data.validation_path=x", FEW, "data path 'x': no such file or f"),
    (f"{TRAIN} --config.data.path=HERE/one.txt", ONE, "train.sequence_length=32 is longer than the 11 tokens to train"),
    (f"{TRAIN} --config.data.path=HERE/texts --config.train.global_batch=4096", FEW, "use --config.train.global_b"),
    (f"{TRAIN} '--config.data.mixture=1 HERE/texts, 1 HERE/one.txt'", FEW, "is not a weight and a path; write, for e"),
    (f"{TRAIN} --config.data.source=json --config.data.path=HERE/texts", FEW, "data.source=json is unknown; did you"),
    (f"{TRAIN} --config.data.path=s3://bucket/x", {}, "s3://bucket/x: Install s3fs to access S3, or use gs:// or a lo"),
    (f"train.py {SUDOKUS} --config.data.path=HERE/none", {}, "is not a folder; name a folder with train.csv and t"),
    (f"train.py {SUDOKUS} --config.data.path=HERE/texts", FEW, "train.csv: No such file or directory; data.path"),
    # topology
    ("train.py --topology=v4_32", {}, "--topology=v4_32 is unknown; did you mean v4-32"),
    (f"{TRAIN} --topology=cpu-8", {}, "train.global_batch=4 is not a multiple of its 8 shards"),
    (f"{TRAIN} --topology=v4-8 --config.model.embed_dim=18", {}, "which mesh.fsdp=4 needs; use 16 or 20"),
    ("generate.py --workdir=HERE/solver --config=configs/tiny.py", {}, "--config=configs/tiny.py is not the recipe of"),
    ("generate.py --workdir=HERE/solver --topology=v4-8", {}, "--topology is not read here: this command runs"),
    ("rehearse.py --topology=v4-33", {}, "--topology=v4-33 is unknown; did you mean v4-32"),
    ("rehearse.py --compare=v4-8,v4-99", {}, "--compare=v4-99 is unknown"),
    ("rehearse.py --topology=v4-8 --config.mesh.fsdp=3", {}, "mesh fsdp=3 needs 3 devices, but there are 4"),
    ("rehearse.py --topology=v4-8 --config.train.global_batch=6", {}, "=6 is not a multiple of its 4 shards"),
    ("rehearse.py --topology=cpu-8 --search", {}, "--search and --scaling are only for slices of TPUs and GPUs"),
    ("pod.py create --transport=local --pod_root=HERE/pods --workers=3", {}, "--workers=3 does not divide the 16 chip"),
    # files
    ("train.py --config=HERE/small.py --workdir=HERE/small.py", {}, "small.py is a file; name a folder"),
    (f"{TRAIN} --workdir=gs://", {}, "gs:// names no bucket; write gs://BUCKET/FOLDER"),
    (f"{TRAIN} --workdir=s3://bucket/run", {}, "a run can be in a local folder or in a gs:// bucket"),
    ("train.py --evaluate_only --workdir=HERE/none", {}, "HERE/none holds no run: there is no HERE/none/config.json"),
    ("train.py --verify_checkpoints --workdir=HERE/run", {"run/config.json": '{"mo'}, "run/config.json: is not valid "),
    (f"{TRAIN} --config.data.cache_dir=HERE/one.txt --config.data.path=HERE/texts", ONE | FEW, "name a writable "),
    (f"{TRAIN} --config.lora.rank=4", {}, "lora.rank=4 needs train.init_from (the folder of the run whose weights"),
    ("generate.py --workdir=HERE", {}, "HERE holds no run: there is no HERE/config.json; train first, or na"),
    ("generate.py --workdir=HERE/solver", {}, "HERE/solver is a recursive model; give it a puzzle, --puzzle=FILE"),
    ("generate.py --workdir=HERE/solver --prompt=x", {}, "HERE/solver is a recursive model, which solves puzzles; giv"),
    (f"{SOLVE}/none", {}, "none: No such file or directory; name a text file with a Sudoku or a maze"),
    (f"{SOLVE}/p --html=HERE/none/x.html", {"p": "1..4\n" * 4}, "x.html: the folder HERE/none does not exist"),
    (f"{SOLVE}/p", {"p": "1..4\n.41\n2...\n...1\n"}, "p:2: the Sudoku has 15 cells; it needs 16, 36 or 81"),
    (f"{SOLVE}/p", {"p": "1..x\n"}, "p:1: 'x' in column 4 is not a cell; a Sudoku consists of digits"),
    (f"{SOLVE}/p", {"p": "." * 9 + "\n"}, "p:1: the Sudoku has 9 cells"),
    (f"{SOLVE}/p", {"p": ("." * 9 + "\n") * 9}, "the puzzle is a sudoku of 9 x 9, but the model has model.max_length="),
    ("convert.py import --hf=HERE/none --workdir=HERE/run", {}, "none: No such file or directory (config.json); name "),
    ("convert.py import --hf=HERE --workdir=HERE/run", {"config.json": '{"x'}, "config.json: is not valid JSON ("),
    ("convert.py import --hf=HERE --workdir=HERE/run", {"config.json": '{"model_type": "bert"}'}, "cannot be conver"),
    ("convert.py import --hf=tests/fixtures/hugging_face/qwen2 --workdir=HERE", {}, "HERE exists already; name anot"),
    ("convert.py import --trm=HERE/one.txt --workdir=HERE/run", ONE, "model.name=decoder_lm is not the model of the"),
    (f"convert.py import --trm=HERE/none {SUDOKUS}", {}, "; name a safetensors file"),
    ("convert.py export --trm=HERE/x --workdir=HERE/none", {}, "holds no run"),
    ("convert.py logits --workdir=HERE/decoder --tokens=HERE/one.txt --out=HERE/x", ONE, "txt: not a readable .npy"),
    ("convert.py logits --workdir=HERE/decoder --tokens=HERE/x --out=HERE/y", {"x": "PK\3\4"}, "x: not a readable .n"),
    ("convert.py logits --workdir=HERE/decoder --tokens=x --out=HERE/one.txt", ONE, "one.txt exists already; name ano"),
    ("rehearse.py --topology=v4-8 --json=HERE/r --html=HERE/r", {}, "--json and --html name the same file, HERE/r; "),
    ("rehearse.py --topology=v4-8 --json=HERE", {}, "--json=HERE is a folder; name a file in it"),
    ("rehearse.py --topology=v4-8 --json=HERE/none/r.json", {}, "r.json: the folder HERE/none does not exist"),
    ("pod.py create --transport=local --pod_root=HERE/one.txt", ONE, "Not a directory; name a folder that can be writ"),
    ("examples/conversations.py", {}, "the following arguments are required: FOLDER"),
    # sizes that nothing has
    (f"{TRAIN} --config.model.num_layers=1000000", {}, "model.num_layers=1000000 must be at most 10,000"),
    (f"train.py --workdir=HERE/{'x' * 300}", {}, "a name in this path has over 255 bytes"),
    (f"{TRAIN} --config.mesh.fsdp=99999999999", {}, "mesh.fsdp=99999999999 must be at most 1,000,000"),
    (f"{TRAIN} --config.layout.changes='1: data=99999999999999999999'", {}, "and at most 1,000,000, as in 4,4,2"),
    ("train.py --topology=99999999999xv4-32", {}, "--topology=99999999999xv4-32 is unknown (all: cpu, "),
    ("rehearse.py --topology=v4-8 --processes=1000000000", {}, "--processes=1000000000 must be at most 1,000"),
    (f"rehearse.py --topology=v4-8 --advise_sharding={'9' * 20}", {}, "not a whole number greater than 0 with at"),
    ("rehearse.py --topology=v4-8 --advise_sharding=8,8,8,8,8,8,8", {}, "_sharding has 7 sizes; give at most 6"),
    ("pod.py create --transport=local --workers=1000000000", {}, "--workers=1000000000 must be at most 1,000"),
    ("pod.py create --slices=1000000000 --queued", {}, "--slices=1000000000 must be at most 999"),
    ("pod.py create --type=v4 --topology=9999999999x2x4", {}, "--topology=9999999999x2x4 is not the shape of a slice"),
    ("pod.py tail --wait_seconds=1e300", {}, "--wait_seconds=1e300 must be at most 1,000,000,000"),
    ("pod.py tail --poll_seconds=nan", {}, "--poll_seconds=nan must be at most"),
    ("pod.py ssh --worker=0-999999999999999", {}, "--worker=0-999999999999999 is not all, a number, a range"),
    # environment
    ("JAX_PLATFORMS=tpu train.py", {}, "JAX_PLATFORMS=tpu, but this machine has no tpu; unset it to use the cpu"),
    ("JAX_PLATFORMS=CPU train.py", {}, "JAX_PLATFORMS=CPU is not one of cpu, gpu, cuda, tpu; unset it to use the cpu"),
    ("JAX_NUM_CPU_DEVICES=many train.py", {}, "JAX_NUM_CPU_DEVICES=many is not a whole number greater than 0; unset i"),
    ("JAX_NUM_PROCESSES=2 train.py", {}, "JAX_NUM_PROCESSES=2 without JAX_COORDINATOR_ADDRESS, "),
    ("TPU_AXIS_NAMES=data,model train.py", {}, "TPU_AXIS_NAMES=data,model without TPU_MESH_CONFIG, a number of devic"),
    ("TPU_MESH_CONFIG=4x4 train.py", {}, "TPU_MESH_CONFIG=4x4: '4x4' is not a whole number greater than 0, as in 4,4,"),
    ("TPU_MESH_CONFIG=1,1,1 TPU_AXIS_NAMES=data,modle,fsdp train.py", {}, "'modle' is not a mesh axis; did you mea"),
    ("TPU_MESH_CONFIG=99999999999999999999,1,1 train.py", {}, "'99999999999999999999' is not a whole number greater"),
    ("TPU_MESH_CONFIG=4096,1,1 train.py", {}, "one process cannot simulate 4,096 devices, only 256"),
    ("XLA_FLAGS=--xla_force_host_platform_device_count=0 train.py", {},
     "XLA_FLAGS=--xla_force_host_platform_device_count=0 is not a whole number greater than 0"),
    ("JAX_NUM_CPU_DEVICES=1000000 train.py", {}, "one process cannot simulate 1,000,000 devices"),
    (f"XLA_USE_BF16=1 {TRAIN} --config.model.dtype=float32", {}, "XLA_USE_BF16=1 and model.dtype=float32 contradict"),
    (f"XDG_CACHE_HOME=/proc {TRAIN} --config.data.path=HERE/texts", FEW, "data.cache_dir=/proc/torus: No such file or"),
    ("ZONE= PROJECT=p pod.py create", {}, "ZONE is not set: export ZONE=... or give --zone=..."),
    ("ENABLE_CAUSAL=maybe pod.py create", {}, "ENABLE_CAUSAL=maybe is neither true nor false"),
]  # fmt: skip


@pytest.fixture
def here(tmp_path):
    """A folder with a recipe of a small model, and what a language model and a recursive one leave, without weights."""
    (tmp_path / "small.py").write_text(RECIPE)
    for name, recipe in (("decoder", tmp_path / "small.py"), ("solver", "configs/trm/sudoku_mini.py")):
        (tmp_path / name).mkdir()
        stored = flat(loading.load(str(recipe), "", {}).config)
        (tmp_path / name / "config.json").write_text(json.dumps(stored))
    return tmp_path


@pytest.mark.parametrize(("typed", "files", "says"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(here, typed, files, says):
    for name, content in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(content.encode() if isinstance(content, str) else content)
    there = sorted(here.rglob("*"))
    status, err = answered(typed.replace("HERE", str(here)), here / "cache")
    assert status == 2 and says.replace("HERE", str(here)) in err.splitlines()[-1], err
    assert len(err.splitlines()) == 1 or "examples/" in typed, err  # which prints its usage first
    assert [path for path in sorted(here.rglob("*")) if here / "cache" not in (path, *path.parents)] == there


def answered(typed: str, cache: pathlib.Path) -> tuple[int, str]:
    """Return the status and stderr of a command line on a machine with one CPU device."""
    words = shlex.split(typed)
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    kept = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "MAKEFLAGS")}
    environment = kept | {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1", "XLA_FLAGS": " ".join(flags)}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    if words[0] == "make":
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr
    process = warm.start(words, environment)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.mark.parametrize("command", ["train.py", "pod.py"])
def test_a_python_without_the_packages_says_what_to_do(command):
    done = subprocess.run([sys.executable, "-S", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("run `make setup`, then .venv/bin/python\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("target", ["train", "rehearse"])
def test_a_variable_of_make_that_has_a_space_is_one_word(target):
    done = subprocess.run(["make", "-n", target, "TOPOLOGY=v4 8"], cwd=ROOT, capture_output=True, text=True)
    assert "--topology='v4 8'" in done.stdout


@pytest.mark.parametrize("asked", ["", "-m slow", "tests/core tests/test_pod.py::test_any -x"])
def test_make_takes_the_paths_of_tests_that_are_there(asked):
    done = subprocess.run(["make", "-n", "test-all", f"ARGS={asked}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"--dist=worksteal {asked}" in done.stdout, done.stderr
