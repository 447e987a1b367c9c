# Kilnworks: `make demo` runs the main job, `make test` the tests; each sets up what it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PORT ?= 4200
# Threads that spin for long starve the other processes of a small machine.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 10000
export DO_NOT_TRACK ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
BIN := $(VENV)/bin
QUIET := --quiet --quiet --disable-pip-version-check --no-input
PIP := $(BIN)/python -m pip install $(QUIET)
# Tests of one file share what is slow to make, so a file goes to one process. One thread each; one
# process more than cores, as many tests wait for others that start.
PROCESSES ?= 3
# Runtimes that are tested; those with an environment of their own have it made.
RUNTIMES ?= torch jax xla mindspore
KNOWN := torch jax xla mindspore
$(if $(filter-out $(KNOWN),$(RUNTIMES)),$(error RUNTIMES: $(filter-out $(KNOWN),$(RUNTIMES)) is not one of $(KNOWN)))
APART := $(filter xla mindspore,$(RUNTIMES))
# libtpu is built for this platform alone.
LIBTPU := $(if $(filter jax,$(RUNTIMES)),$(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)))
export KILN_RUNTIMES := $(RUNTIMES)
# Of what is tested, these fail where they cannot run; others are skipped.
test soak: export KILN_MUST_RUN ?= torch jax xla mindspore hpu npu $(if $(LIBTPU),libtpu)

.PHONY: help demo environments setup setup-plan setup-xla setup-mindspore quick test soak faults lint format ui clean

help:
	@echo "make demo    real digits to a published, evaluated model (about 3 minutes after set-up)"
	@echo "make quick   unit tests, in under a minute"
	@echo "make test    lint, types, and tests of all that Kilnworks can do (of some: RUNTIMES=\"torch jax\")"
	@echo "make soak    more kills, model families and true sizes; planted faults"
	@echo "make faults  plant faults in a copy of the code, one by one: the tests must catch each"
	@echo "make setup   the environment alone (about 4 minutes, once)"
	@echo "make setup-xla  runtime xla's own environment, in .venv-xla (7 GB, about 3 minutes, once)"
	@echo "make setup-plan  the TPU's compiler, for kiln plan (no TPU is needed)"
	@echo "make setup-mindspore  runtime mindspore's, in .venv-mindspore (3 GB, about 2 minutes, once)"
	@echo "make ui      Prefect's server on http://127.0.0.1:4200 (another: PORT=4201), with the runs so far"
	@echo "make lint    ruff and mypy;  make format  ruff format"
	@echo "make clean   remove the environment (the store stays)"

demo: setup
	$(BIN)/kiln run digits

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=25 --durations-min=5

quick: $(VENV)/dev.stamp
	$(PYTEST) -m "not slow and not soak" --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder

test:
	$(MAKE) --no-print-directory --jobs 2 environments lint
	$(PYTEST) -m "not soak" --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder

soak: environments
	$(PYTEST) -m soak --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder

# A part of them: make faults SHARD=3/8, the fourth of eight.
faults: environments
	$(BIN)/python tests/faults/run.py $(if $(SHARD),--shard $(SHARD))

environments: $(VENV)/dev.stamp $(APART:%=setup-%) $(if $(LIBTPU),setup-plan)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ui: setup
	$(BIN)/prefect server start --host 127.0.0.1 --port $(PORT)

setup: $(VENV)/base.stamp

$(VENV)/base.stamp: requirements/torch.txt requirements/base.txt pyproject.toml
	@echo "Setting up $(VENV) with $(PYTHON): about 200 packages, 2.5 GB on disk, about 4 minutes, once."
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=...")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "[1/3] PyTorch (the largest single download, so it goes first)"
	@$(PIP) -r requirements/torch.txt
	@echo "[2/3] Prefect, Beam, img2dataset, diffusers and what they need ($$(wc -l < requirements/base.txt) pinned packages)"
	@$(PIP) --no-deps -r requirements/base.txt
	@echo "[3/3] kiln itself, from this checkout"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# Only its compiler is used, by `kiln plan`: in the environment it would slow every start.
setup-plan: .libtpu/stamp

.libtpu/stamp: requirements/plan.txt $(VENV)/base.stamp
	@echo "Adding the TPU's compiler"
	@$(PIP) --no-deps --upgrade --target .libtpu -r requirements/plan.txt
	@touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp requirements/dev.txt
	@echo "Adding the test tools: pytest, ruff, mypy, import-linter"
	@$(PIP) --no-deps -r requirements/dev.txt
	@touch $@

# Runtimes with an environment of their own: the framework first, then the rest, pinned and whole.
setup-xla: $(VENV)-xla/stamp

$(VENV)-xla/stamp: requirements/xla-torch.txt requirements/xla.txt pyproject.toml
	@echo "Setting up $(VENV)-xla with $(PYTHON): PyTorch/XLA, 7 GB on disk, about 3 minutes, once."
	@test -x $(VENV)-xla/bin/pip || $(PYTHON) -m venv $(VENV)-xla
	@$(VENV)-xla/bin/python -m pip install $(QUIET) --no-cache-dir -r requirements/xla-torch.txt
	@$(VENV)-xla/bin/python -m pip install $(QUIET) --no-deps -r requirements/xla.txt
	@$(VENV)-xla/bin/python -m pip install $(QUIET) --no-deps --editable .
	@touch $@

setup-mindspore: $(VENV)-mindspore/stamp

$(VENV)-mindspore/stamp: requirements/mindspore.txt pyproject.toml
	@echo "Setting up $(VENV)-mindspore with $(PYTHON): MindSpore and mindone, 3 GB on disk, about 2 minutes, once."
	@test -x $(VENV)-mindspore/bin/pip || $(PYTHON) -m venv $(VENV)-mindspore
	@$(VENV)-mindspore/bin/python -m pip install $(QUIET) --no-deps -r requirements/mindspore.txt
	@$(VENV)-mindspore/bin/python -m pip install $(QUIET) --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .libtpu *.egg-info
