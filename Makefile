# Kilnworks: `make demo` runs the main job, `make test` the tests; each sets up what it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PORT ?= 4200
# Threads that spin for long starve the other processes of a small machine.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 10000
export DO_NOT_TRACK ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export NO_ALBUMENTATIONS_UPDATE ?= 1
# Programs that start again and again need their bytecode kept.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# Tests of one file share what is slow to make, so a file goes to one process. One thread each; one
# process more than cores, as many tests wait for others that start.
PROCESSES ?= 3
# Runtimes that are tested; those with an environment of their own have it made.
RUNTIMES ?= torch jax xla mindspore
OWN := xla mindspore
ifneq ($(filter-out torch jax $(OWN),$(RUNTIMES)),)
$(error RUNTIMES: $(filter-out torch jax $(OWN),$(RUNTIMES)) is none of torch jax $(OWN))
endif
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
	@echo "make setup   the environment alone (about a minute, once)"
	@echo "make setup-xla  runtime xla's own environment, in $(VENV)-xla (6 GB, about a minute, once)"
	@echo "make setup-plan  the TPU's compiler, for kiln plan (no TPU is needed)"
	@echo "make setup-mindspore  runtime mindspore's, in $(VENV)-mindspore (3 GB, half a minute, once)"
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

# A part of them: make faults SHARD=3/8, the fourth of eight; 11/8 is the same one.
faults: environments
	$(BIN)/python tests/faults/run.py $(if $(SHARD),--shard $(SHARD))

environments: $(VENV)/dev.stamp $(patsubst %,setup-%,$(filter $(OWN),$(RUNTIMES))) $(if $(LIBTPU),setup-plan)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ui: setup
	PREFECT_UI_API_URL=http://127.0.0.1:$(PORT)/api $(BIN)/prefect server start --host 127.0.0.1 --port $(PORT)

setup: $(VENV)/stamp

UV := $(VENV)-uv
CHECK := import sys; from importlib.util import find_spec; v = "%d.%d" % sys.version_info[:2]; \
  v in ("3.11", "3.12") or sys.exit(f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v}: make PYTHON=..."); \
  find_spec("ensurepip") or sys.exit(f"$(PYTHON) has no venv: on Debian and Ubuntu, apt install python{v}-venv")
# uv is told to look where pip is told to look; of two settings, the environment's comes last.
FROM_PIP := sort -r | sed -n 's/^.*\.index-url=/export UV_DEFAULT_INDEX=/p; s/^.*\.find-links=/export UV_FIND_LINKS=/p'
uv = eval "$$($(UV)/bin/python -m pip config list | $(FROM_PIP))"; $(UV)/bin/uv --quiet
make_environment = test -x $(1)/bin/pip || { $(uv) venv --clear --seed --python $(UV)/bin/python $(1); }
install = $(uv) pip install --python $(1)/bin/python
install_kiln = $(call install,$(1)) --no-deps --build-constraints requirements/base.txt --editable .
# To import what runs import shows that it is there, and writes its bytecode: a quarter of all there is.
import = said=$$($(1)/bin/python -c "$(foreach name,$(2),import $(name);)" 2>&1) || { echo "$$said"; exit 1; }

$(UV)/stamp: requirements/uv.txt
	@$(PYTHON) -c '$(CHECK)'
	@rm -rf $(UV) && $(PYTHON) -m venv $(UV)
	@$(UV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input --requirement $<
	@touch $@

$(VENV)/torch.stamp: requirements/torch.txt | $(UV)/stamp
	@echo "$(VENV): PyTorch"
	@$(call make_environment,$(VENV))
	@$(call install,$(VENV)) --constraints requirements/base.txt --requirements $<
	@touch $@

$(VENV)/base.stamp: requirements/base.txt $(VENV)/torch.stamp
	@echo "$(VENV): Prefect, Beam, img2dataset, diffusers and what they need ($$(wc -l < $<) pinned packages)"
	@$(call install,$(VENV)) --no-deps --requirements $<
	@$(call import,$(VENV),prefect.server.api.server apache_beam img2dataset flows.finetune runtimes.torch.runtime)
	@touch $@

$(VENV)/stamp: pyproject.toml $(VENV)/base.stamp
	@$(call install_kiln,$(VENV))
	@touch $@

$(VENV)/dev.stamp: requirements/dev.txt $(VENV)/stamp
	@echo "$(VENV): pytest, ruff, mypy, import-linter"
	@$(call install,$(VENV)) --no-deps --requirements $<
	@touch $@

# Runtimes with an environment of their own.
$(OWN:%=setup-%): setup-%: $(VENV)-%/stamp

$(OWN:%=$(VENV)-%/list.stamp): $(VENV)-%/list.stamp: requirements/%.txt | $(UV)/stamp
	@echo "$(VENV)-$*: runtime $* ($$(wc -l < $<) pinned packages)"
	@$(call make_environment,$(VENV)-$*)
	@$(call install,$(VENV)-$*) --no-deps --requirements $<
	@$(call import,$(VENV)-$*,runtimes.$*.runtime runtimes.$*.encode)
	@touch $@

$(OWN:%=$(VENV)-%/stamp): $(VENV)-%/stamp: pyproject.toml $(VENV)-%/list.stamp
	@$(call install_kiln,$(VENV)-$*)
	@touch $@

# Only its compiler is used, by `kiln plan`: in the environment it would slow every start.
setup-plan: $(VENV)-libtpu/stamp

$(VENV)-libtpu/stamp: requirements/plan.txt | $(UV)/stamp
	@echo "$(VENV)-libtpu: the TPU's compiler, 0.7 GB on disk"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* *.egg-info
