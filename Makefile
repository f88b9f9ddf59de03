CONFIG ?= configs/tiny.py
python := .venv/bin/python
uv := $(shell command -v uv 2>/dev/null)

# A GPU has /dev/nvidia0 (under WSL only nvidia-smi finds it). A TPU has /dev/accel0; newer ones have a vfio device, and
# the machine has PCI devices of Google.
detected := $(shell exec 2>/dev/null; \
    if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null; then echo gpu; \
    elif [ -e /dev/accel0 ] || { ls /dev/vfio/[0-9]* && grep 0x1ae0 /sys/bus/pci/devices/*/vendor; } >/dev/null; then echo tpu; \
    else echo cpu; fi)
# Without ACCELERATOR, the one that .venv was made for is used, so that a finished .venv needs no network.
installed := $(patsubst .venv/installed-%.lock,%,$(wildcard .venv/installed-*.lock))
ACCELERATOR ?= $(or $(installed),$(detected))
override EXTRAS := $(sort $(EXTRAS) $(patsubst .venv/extra-%,%,$(wildcard .venv/extra-*)))

extras := bench causality huggingface interop lm-eval reasoning serve studies wandb
unknown := $(filter-out $(extras),$(EXTRAS))

# A variable that is not read is an error: TOPOLGY=v4-32 would otherwise train without a topology.
variables := ACCELERATOR ARGS CONFIG EXTRAS OSV PORT PYTHON STORAGE TOPOLOGY WORKDIR
typed := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
$(if $(filter-out $(variables),$(typed)),$(error \
    $(firstword $(filter-out $(variables),$(typed))) is not a variable; they are $(variables). Keys go into ARGS="--config...."))

# glibc asks Linux for huge pages. XLA allocates its temporaries anew in each step, and a step on a CPU spent a fifth of
# its time on their page faults (docs/decisions/training.md).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: help setup train runs report rehearse reasoning tensorboard dashboard test test-all bench lint style audit format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

locks = $(strip requirements.lock $(patsubst %,requirements-%.lock,$(filter-out cpu,$(ACCELERATOR)) $(EXTRAS)))
# The stamp is a copy of the lock files. So a checkout, which changes only times, installs nothing again.
stamp = .venv/installed-$(ACCELERATOR).lock
# If this file exists, an install was interrupted, and .venv is made again from the start.
unfinished := .venv/unfinished

# A function of what else makes a Python unsuitable.
suitable = -c 'import sys$(if $(uv),,, ensurepip); sys.exit(not (3, 11) <= sys.version_info < (3, 14)$(1))' 2>/dev/null
version := -c 'import sys; print(sys.version_info[:2])' 2>/dev/null
# A .venv that was removed in part may still have its Python, which then is that of the system.
usable = [ ! -e $(unfinished) ] && $(python) $(call suitable, or sys.prefix == sys.base_prefix) \
    $(if $(PYTHON),&& [ "$$($(PYTHON) $(version))" = "$$($(python) $(version))" ])

# An interrupted `rm -rf .venv` would leave a part that looks whole.
remove := rm -rf .venv-removed && { [ ! -e .venv ] && [ ! -L .venv ] || mv .venv .venv-removed; } && rm -rf .venv-removed

define create
for candidate in $(or $(PYTHON),python3.13 python3.12 python3.11 python3) none; do \
    if $$candidate $(call suitable); then break; fi; \
done; \
if [ $$candidate = none ]; then \
    echo "setup: found no Python 3.11 to 3.13 (with venv)$(if $(PYTHON), in PYTHON=$(PYTHON)); name one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; \
fi; \
$(remove) && mkdir .venv && touch $(unfinished) && \
$(if $(uv),uv venv --quiet --seed --allow-existing --python $$candidate .venv,$$candidate -m venv .venv) || exit 1
endef

pip = $(if $(uv),uv pip install --python $(python),$(python) -m pip install) --quiet --only-binary :all:
torch := $(shell sed -n 's/^interop = \[\("torch==[^]]*\)\].*/\1/p' pyproject.toml | tr -d '",')

# These packages are published as source only.
sources_of_lm-eval := rouge-score,sqlitedict,word2number
sources_of_reasoning := cellpylib,pycosat,zss

# The lock files have every package, so --no-deps: pip cannot check an extra of a locked package by its hash.
define install
echo "setup: installing $(locks) into .venv, $$($(python) --version); it takes a minute or more"; \
touch $(unfinished); \
if $(pip) --no-deps $(foreach extra,$(EXTRAS),$(addprefix --no-binary ,$(sources_of_$(extra)))) --require-hashes $(addprefix -r ,$(locks)) $(if $(filter interop,$(EXTRAS)),&& $(pip) $(torch)); \
then rm -f .venv/installed-*.lock && cat $(locks) >$(stamp) && rm $(unfinished) \
    $(if $(EXTRAS),&& touch $(addprefix .venv/extra-,$(EXTRAS))); \
else rm $(unfinished); echo "setup: $(locks) could not be installed; the cause is above" >&2; exit 1; fi
endef

# A .venv for another GPU or TPU is made again; to one for the CPU, packages are added. flock, if it is installed, lets only one set-up run at a time.
setup: ## install what is needed into .venv [ACCELERATOR=cpu|gpu|tpu] [EXTRAS="bench causality huggingface interop lm-eval reasoning serve studies wandb"] [PYTHON=python3.12]
	$(if $(filter cpu gpu tpu,$(ACCELERATOR)),,$(error ACCELERATOR=$(ACCELERATOR) is unknown: it is cpu, gpu or tpu))
	$(if $(unknown),$(error EXTRAS=$(unknown) is unknown; there are $(extras)))
	@exec 9<Makefile; flock 9 2>/dev/null; \
	if $(usable) && cat $(locks) | cmp -s - $(stamp); then exit; fi; \
	{ $(if $(filter-out cpu $(ACCELERATOR),$(installed)),false,$(usable)); } || { $(create); }; \
	$(install)

train: setup ## train [CONFIG=configs/large.py] [TOPOLOGY=v4-32] [WORKDIR=runs/mine] [ARGS="--config.train.steps=10"]
	$(python) train.py --config='$(CONFIG)' $(if $(TOPOLOGY),--topology='$(TOPOLOGY)') $(if $(WORKDIR),--workdir='$(WORKDIR)') $(ARGS)

runs: setup ## list the runs with state, step, losses and command [ARGS=FOLDER]
	$(python) scripts/list_runs.py $(ARGS)

report: setup ## write report.html about runs [ARGS="runs/mine runs/other --html=FILE"]
	$(python) report.py $(or $(ARGS),$(error report needs the folders of runs: make report ARGS=runs/mine))

rehearse: setup ## compile the step for a slice that is not there TOPOLOGY=v4-32 [CONFIG=...] [ARGS="--search"]
	$(python) rehearse.py --config='$(CONFIG)' $(if $(TOPOLOGY),--topology='$(TOPOLOGY)') $(ARGS)

reasoning: setup ## train on arithmetic countdown; compare searches, then reinforcement learning [ARGS=--quick]
	$(python) benchmarks/countdown.py $(ARGS)
	$(python) benchmarks/grpo.py $(ARGS)

tensorboard: setup ## show the metrics of runs in a browser [WORKDIR=runs/mine] [PORT=6006]
	@test -d '$(or $(WORKDIR),runs)' || { echo "error: $(or $(WORKDIR),runs) is not a folder; name that of a run, or of runs" >&2; exit 2; }
	.venv/bin/tensorboard --logdir='$(or $(WORKDIR),runs)' --host=127.0.0.1 --port=$(or $(PORT),6006)

dashboard: setup ## show the studies in a browser, after make setup EXTRAS=studies [STORAGE=sqlite:///studies.db] [PORT=8080]
	$(if $(or $(STORAGE),$(wildcard studies.db)),,$(error there is no studies.db here: sweep.py makes it; or name one, STORAGE=sqlite:///FILE))
	$(if $(STORAGE),$(if $(findstring ://,$(STORAGE)),,$(error STORAGE=$(STORAGE) is not an address of a database; write STORAGE=sqlite:///FILE)))
	$(if $(filter sqlite:///%,$(STORAGE)),$(if $(shell test -f '$(STORAGE:sqlite:///%=%)' && echo there),,$(error STORAGE=$(STORAGE): there is no such file; sweep.py makes it)))
	.venv/bin/optuna-dashboard '$(or $(STORAGE),sqlite:///studies.db)' --port=$(or $(PORT),8080)

# One process more than there are cores, of up to 1.5 GiB each, since some tests wait for programs that they started.
# PYTHONDONTWRITEBYTECODE is emptied, also for benchmarks; otherwise each of these programs would compile the
# workspace's Python again.
# A single file runs faster without other processes: .venv/bin/python -m pytest tests/...
# A test is named FILE::TEST.
absent = $(strip $(foreach name,$(filter tests/%,$(ARGS)),$(if $(wildcard $(firstword $(subst ::, ,$(name)))),,$(name))))
run_tests = $(if $(absent),$(error $(firstword $(absent)) does not exist))PYTHONDONTWRITEBYTECODE= $(python) -m pytest --numprocesses=$$(($$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses=8 --dist=worksteal
test: setup ## run the tests that are not marked slow, or all of a folder, on all cores [ARGS="tests/layers -x"]
	$(run_tests) $(if $(filter tests/%,$(ARGS)),,-m "not slow") $(ARGS)

test-all: setup ## run all tests, on all cores [ARGS="tests/pods -x"]
	$(run_tests) $(ARGS)

bench: setup ## run the benchmarks and write benchmarks/RESULTS.md [ARGS="layouts cpu_step"]
	PYTHONDONTWRITEBYTECODE= $(python) benchmarks/run_all.py $(ARGS)

lint: style audit ## check style, format, and the locked packages for known vulnerabilities

style: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .

# The vulnerabilities are those of OSV, because a mirror of the package index has packages only. If OSV cannot be
# reached, `make lint` continues without the audit, and `make audit` fails.
OSV ?= https://api.osv.dev/v1/query
audit: setup
	@if $(python) -c 'import requests; requests.head("$(OSV)", timeout=10)' 2>/dev/null; \
	then $(python) -m pip_audit --disable-pip --progress-spinner=off --vulnerability-service=osv \
	    --osv-url=$(OSV) $(addprefix -r ,$(sort $(wildcard requirements*.lock))); \
	else echo "audit: $(OSV) is out of reach; the locked packages were not looked up" >&2; \
	    $(if $(filter audit,$(MAKECMDGOALS)),exit 1,true); fi

format: setup ## format the code, and fix what ruff can fix
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

compile = $(or $(uv),.venv/bin/uv) pip compile --quiet --universal --generate-hashes --custom-compile-command "make lock" $(1) -o $(2) $(ARGS)
lock: ## resolve pyproject.toml again and write the lock files [ARGS=--upgrade]; needs uv
	$(call compile,pyproject.toml --group dev,requirements.lock)
	$(call compile,--group gpu -c requirements.lock,requirements-gpu.lock)
	$(call compile,--group tpu -c requirements.lock,requirements-tpu.lock)
	$(call compile,--group causality -c requirements.lock,requirements-causality.lock)
	$(call compile,--group huggingface -c requirements.lock,requirements-huggingface.lock)
	$(call compile,--group interop -c requirements.lock,requirements-interop.lock)
	$(call compile,--group reasoning -c requirements.lock,requirements-reasoning.lock)
	$(call compile,--group lm-eval -c requirements.lock -c requirements-huggingface.lock -c requirements-interop.lock -c requirements-reasoning.lock,requirements-lm-eval.lock)
	$(call compile,--group serve -c requirements.lock,requirements-serve.lock)
	$(call compile,--group studies -c requirements.lock,requirements-studies.lock)
	$(call compile,--group wandb -c requirements.lock,requirements-wandb.lock)
	$(call compile,--group bench -c requirements.lock,requirements-bench.lock)

clean: ## remove .venv and what the tools left; runs/ stays
	$(remove)
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
