# Kilnworks: `make demo` runs the demo, `make test` the tests; both create their environments.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PORT ?= 4200
# Address of the package index that has the wanted build of PyTorch; empty: pip's index.
TORCH_INDEX ?=
# Spinning OpenMP threads would take the cores from other processes of a small machine.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 10000
export DO_NOT_TRACK ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export NO_ALBUMENTATIONS_UPDATE ?= 1
# Bytecode makes repeated starts of programs faster.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# The tests of a file share slow fixtures, so a file runs in one process. Each process has one thread;
# more of them than cores, because many tests wait for child processes.
PROCESSES ?= 3
# Runtimes to test; their environments are created.
RUNTIMES ?= torch jax xla mindspore
OWN := xla mindspore
ifneq ($(filter-out torch jax $(OWN),$(RUNTIMES)),)
$(error RUNTIMES: $(filter-out torch jax $(OWN),$(RUNTIMES)) is not one of torch jax $(OWN))
endif
# libtpu exists for Linux x86_64 only.
LIBTPU := $(if $(filter jax,$(RUNTIMES)),$(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)))
# Slurm for tests comes from the packages of Debian and Ubuntu.
SLURM := $(if $(filter Linux,$(shell uname -s)),$(if $(shell command -v apt-get),slurm))
export KILN_RUNTIMES := $(RUNTIMES)
# Tests of these fail if they cannot run; others are skipped. REQUIRE adds names, such as chromium.
test extended soak: export KILN_MUST_RUN ?= torch jax xla mindspore hpu npu ray $(if $(LIBTPU),libtpu) $(SLURM) $(REQUIRE)

.PHONY: help demo environments setup setup-cuda setup-rocm setup-bitsandbytes setup-ocr setup-kubernetes setup-jax-tpu setup-xla-tpu setup-plan setup-oldest setup-browser setup-fidelity setup-peers setup-site setup-deploy setup-slurm setup-ray setup-xla setup-mindspore FORCE quick test extended soak faults fuzz chaos lint format ui site words clean

help:
	@echo "make demo    fine-tune, evaluate and publish a model of digits (5 minutes of CPU time after set-up)"
	@echo "make quick   unit tests, in under a minute"
	@echo "make test    lint, types and tests (of some runtimes: RUNTIMES=\"torch jax\")"
	@echo "make extended  tests of further runtimes, engines, stores and settings"
	@echo "make soak    long tests: more kills, more model families, full-size models"
	@echo "make faults  plant faults in a copy of the code; tests must catch each (CHANGED=1: fewer)"
	@echo "make fuzz    read 100,000 damaged inputs; each must be refused or read correctly"
	@echo "make chaos   500 faults on three kinds of store; nothing may be lost, wrong or hang"
	@echo "make setup   create the environment (a minute, once)"
	@echo "make setup-ocr   RapidOCR, for describers of kind text"
	@echo "make setup-kubernetes  the client for training on the pods of a cluster"
	@echo "make setup-ray   Ray, for training on the nodes of a Ray cluster"
	@echo "make setup-cuda  PyTorch for NVIDIA GPUs and bitsandbytes (TORCH_INDEX=ADDRESS: of another CUDA version)"
	@echo "make setup-rocm TORCH_INDEX=ADDRESS  PyTorch for AMD GPUs, untested"
	@echo "make setup-jax-tpu, setup-xla-tpu  runtime jax or xla on a TPU VM, with libtpu"
	@echo "make setup-xla  create the environment of runtime xla, $(VENV)-xla (6 GB, a minute, once)"
	@echo "make setup-plan  install the TPU compiler for kiln plan (requires no TPU)"
	@echo "make setup-mindspore  create that of runtime mindspore, $(VENV)-mindspore (3 GB, half a minute, once)"
	@echo "make ui      start Prefect's server and UI with all runs, at http://127.0.0.1:4200 (PORT=4200)"
	@echo "make site    build the site of docs/ in build/site, with the demo's report if it was run"
	@echo "make words  counts the words of each page"
	@echo "make lint    ruff and mypy;  make format  ruff format"
	@echo "make clean   remove the environments (the store remains)"

demo: setup
	$(BIN)/kiln run digits

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=25 --durations-min=5
IN_PARALLEL = --numprocesses $(PROCESSES) --dist loadgroup --no-loadscope-reorder

# Unit tests wait for no child processes, and each process imports all modules.
quick: PROCESSES := 2
quick: $(VENV)/dev.stamp
	$(PYTEST) -m "not slow and not extended and not soak" $(IN_PARALLEL)

test: PROCESSES := 4
test:
	$(MAKE) --no-print-directory --jobs 2 environments lint
	$(PYTEST) -m "not extended and not soak" $(IN_PARALLEL)

# Some files: make extended TESTS="tests/flows/test_train_on_ray.py".
extended: environments
	$(PYTEST) -m "extended and not soak" $(IN_PARALLEL) $(TESTS)

# Without Chromium the tests of pages are skipped, or fail: make soak REQUIRE=chromium.
soak: environments setup-oldest setup-browser setup-fidelity setup-peers
	@command -v chromium chromium-browser > /dev/null || \
	  echo "soak: no Chromium: the tests of pages are skipped: apt-get install chromium"
	$(PYTEST) -rs -m soak $(IN_PARALLEL)

# Some of the faults: CHANGED=1 is those that the last change concerns, and an eighth of the others;
# SHARD=3/8 is the fourth of eight parts; 11/8 is the same part.
faults: environments
	$(BIN)/python tests/faults/run.py $(if $(CHANGED),--changed) $(if $(SHARD),--shard $(SHARD))

# Fewer: make fuzz INPUTS=5000; others: KILN_TEST_SEED=1 make fuzz.
fuzz: $(VENV)/dev.stamp
	$(BIN)/python tests/fuzz/run.py --inputs $(or $(INPUTS),100000)

# Fewer: make chaos FAULTS=60; others: KILN_TEST_SEED=1 make chaos; some: make chaos STORES=local,s3.
STORES ?= local,s3,gcs
chaos: $(VENV)/dev.stamp
	$(BIN)/python tests/chaos/run.py --faults $(or $(FAULTS),510) --stores $(STORES)

environments: $(VENV)/dev.stamp setup-ray setup-deploy setup-bitsandbytes setup-site $(patsubst %,setup-%,$(filter $(OWN),$(RUNTIMES))) $(if $(LIBTPU),setup-plan) $(if $(SLURM),setup-slurm)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The second version of Prefect's UI asks an analytics host for its settings even if analytics are off.
ui: setup
	PREFECT_UI_API_URL=http://127.0.0.1:$(PORT)/api PREFECT_SERVER_UI_V2_ENABLED=false \
	  $(BIN)/prefect server start --host 127.0.0.1 --port $(PORT)

words: $(VENV)/stamp
	@$(BIN)/python docs/site/words.py

# A wrong link fails. The demo's report and data page are examples, if its model is in the store.
CHAMPION := store/registry/digits/champion
site: setup setup-site
	@mkdir -p build/examples
	@if test -f $(CHAMPION)/report.html; then cp $(CHAMPION)/report.html build/examples/ \
	  && $(BIN)/kiln data digits --html build/examples/data.html; fi
	PYTHONPATH=$(VENV)-site NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(VENV)/stamp

UV := $(VENV)-uv
CHECK := import sys; from importlib.util import find_spec; v = "%d.%d" % sys.version_info[:2]; \
  v in ("3.11", "3.12") or sys.exit(f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v}: make PYTHON=..."); \
  find_spec("ensurepip") or sys.exit(f"$(PYTHON) has no venv: on Debian and Ubuntu, apt install python{v}-venv")
# uv uses pip's index settings; an environment variable overrides a file.
FROM_PIP := sort -r | sed -n 's/^.*\.index-url=/export UV_DEFAULT_INDEX=/p; s/^.*\.find-links=/export UV_FIND_LINKS=/p'
uv = eval "$$($(UV)/bin/python -m pip config list | $(FROM_PIP))"; $(UV)/bin/uv --quiet
make_environment = test -x $(1)/bin/pip || { $(uv) venv --clear --seed --python $(UV)/bin/python $(1); }
install = $(uv) pip install --python $(1)/bin/python
install_kiln = $(call install,$(1)) --no-deps --build-constraints requirements/base.txt --editable .
# Importing the modules checks the installation and writes their bytecode, a quarter of all.
import = said=$$($(1)/bin/python -c "$(foreach name,$(2),import $(name);)" 2>&1) || { echo "$$said"; exit 1; }

$(UV)/stamp: requirements/uv.txt
	@$(PYTHON) -c '$(CHECK)'
	@rm -rf $(UV) && $(PYTHON) -m venv $(UV)
	@$(UV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input --requirement $<
	@touch $@

# Another index than that of the environment installs PyTorch again; without one, the build stays.
TORCH_FROM := $(VENV)-torch-index
ifneq ($(TORCH_INDEX),)
$(TORCH_FROM): FORCE
	@echo '$(TORCH_INDEX)' | cmp -s - $@ || echo '$(TORCH_INDEX)' > $@
endif
FORCE:

# From its own index comes PyTorch alone: such an index lacks the pinned versions of other packages.
$(VENV)/torch.stamp: requirements/torch.txt $(if $(TORCH_INDEX),$(TORCH_FROM)) | $(UV)/stamp
	@echo "$(VENV): PyTorch"
	@$(call make_environment,$(VENV))
	@$(if $(TORCH_INDEX),$(call install,$(VENV)) --no-deps --reinstall-package torch --default-index '$(TORCH_INDEX)' --requirements $<)
	@$(call install,$(VENV)) --constraints requirements/base.txt --requirements $<
	@touch $@

# A worker of a TPU slice has only the code of the runtimes.
FLOWS := $(if $(wildcard flows),flows.finetune)
$(VENV)/base.stamp: requirements/base.txt $(VENV)/torch.stamp
	@echo "$(VENV): Prefect, Beam, img2dataset, diffusers and their dependencies ($$(wc -l < $<) pinned packages)"
	@$(call install,$(VENV)) --no-deps --requirements $<
	@$(call import,$(VENV),prefect.server.api.server apache_beam img2dataset $(FLOWS) runtimes.torch.runtime)
	@touch $@

$(VENV)/stamp: pyproject.toml $(VENV)/base.stamp
	@$(call install_kiln,$(VENV))
	@touch $@

$(VENV)/dev.stamp: requirements/dev.txt $(VENV)/stamp
	@echo "$(VENV): pytest, ruff, mypy, import-linter"
	@$(call install,$(VENV)) --no-deps --requirements $<
	@touch $@

setup-ocr: $(VENV)/ocr.stamp
$(VENV)/ocr.stamp: requirements/ocr.txt $(VENV)/stamp
	@$(call install,$(VENV)) --no-deps --requirements $<
	@touch $@

# For section kubernetes of a recipe. It takes 26 MB, which other runs do not need.
setup-kubernetes: $(VENV)/kubernetes.stamp
$(VENV)/kubernetes.stamp: requirements/kubernetes.txt $(VENV)/stamp
	@$(call install,$(VENV)) --no-deps --requirements $<
	@touch $@

setup-ray: $(VENV)/ray.stamp
$(VENV)/ray.stamp: requirements/ray.txt $(VENV)/stamp
	@$(call install,$(VENV)) --no-deps --requirements $<
	@touch $@

# For NVIDIA GPUs. A CPU build is a mistake here, which only its index mends.
setup-cuda: $(VENV)/cuda.stamp

HAS_CUDA := import sys, torch; torch.version.cuda or sys.exit( \
  "PyTorch is a CPU build: make setup-cuda TORCH_INDEX=ADDRESS, of an index with CUDA builds (docs/setup.md)")
$(VENV)/cuda.stamp: requirements/cuda.txt $(VENV)/stamp
	@$(BIN)/python -c '$(HAS_CUDA)'
	@echo "$(VENV): bitsandbytes"
	@$(call install,$(VENV)) --no-deps --requirements $<
	@touch $@

# For AMD GPUs, whose PyTorch has an index of its own. Nothing ran on one.
setup-rocm: $(VENV)/rocm.stamp

HAS_ROCM := import sys, torch; torch.version.hip or sys.exit( \
  "PyTorch is no ROCm build: make setup-rocm TORCH_INDEX=ADDRESS, of an index with ROCm builds (docs/setup.md)")
$(VENV)/rocm.stamp: $(VENV)/stamp
	@$(BIN)/python -c '$(HAS_ROCM)'
	@touch $@

# bitsandbytes for tests on a CPU; in the main environment, peft and transformers would import it.
setup-bitsandbytes: $(VENV)-bitsandbytes/stamp

$(VENV)-bitsandbytes/stamp: requirements/cuda.txt | $(UV)/stamp
	@echo "$(VENV)-bitsandbytes: bitsandbytes, for tests"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

# For runtime jax on a TPU VM: deploy/tpu/setup.sh jax.
setup-jax-tpu: $(VENV)/jax-tpu.stamp

$(VENV)/jax-tpu.stamp: requirements/jax-tpu.txt $(VENV)/stamp
	@echo "$(VENV): libtpu for runtime jax"
	@$(call install,$(VENV)) --no-deps --requirements $<
	@touch $@

# For runtime xla on a TPU VM: deploy/tpu/setup.sh.
setup-xla-tpu: $(VENV)-xla/tpu.stamp

$(VENV)-xla/tpu.stamp: requirements/xla-tpu.txt $(VENV)-xla/stamp
	@echo "$(VENV)-xla: libtpu for runtime xla"
	@$(call install,$(VENV)-xla) --no-deps --requirements $<
	@touch $@

# Environments of runtimes.
$(OWN:%=setup-%): setup-%: $(VENV)-%/stamp

$(OWN:%=$(VENV)-%/list.stamp): $(VENV)-%/list.stamp: requirements/%.txt | $(UV)/stamp
	@echo "$(VENV)-$*: runtime $* ($$(wc -l < $<) pinned packages)"
	@$(call make_environment,$(VENV)-$*)
	@$(call install,$(VENV)-$*) --no-deps --requirements $<
	@$(call import,$(VENV)-$*,runtimes.$*.runtime runtimes.$*.sampler)
	@touch $@

$(OWN:%=$(VENV)-%/stamp): $(VENV)-%/stamp: pyproject.toml $(VENV)-%/list.stamp
	@$(call install_kiln,$(VENV)-$*)
	@touch $@

# `kiln plan` uses only libtpu's compiler; in the main environment it would slow every start.
setup-plan: $(VENV)-libtpu/stamp

$(VENV)-libtpu/stamp: requirements/plan.txt | $(UV)/stamp
	@echo "$(VENV)-libtpu: the TPU compiler, 0.7 GB"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

# The oldest supported diffusers and transformers, for tests of published folders; PyTorch is that of .venv.
setup-oldest: $(VENV)-oldest/stamp

$(VENV)-oldest/stamp: requirements/oldest.txt | $(UV)/stamp
	@echo "$(VENV)-oldest: the oldest supported diffusers and transformers"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

# torch-fidelity, for evaluate.inception and to compare metrics with; its dependencies are those of .venv.
setup-fidelity: $(VENV)-fidelity/stamp

$(VENV)-fidelity/stamp: requirements/fidelity.txt | $(UV)/stamp
	@echo "$(VENV)-fidelity: torch-fidelity and torchvision, 20 MB"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

# InvokeAI and LyCORIS, whose readers load published adapters in tests; the rest is that of .venv.
setup-peers: $(VENV)-peers/stamp

$(VENV)-peers/stamp: requirements/peers.txt | $(UV)/stamp
	@echo "$(VENV)-peers: InvokeAI's and LyCORIS's readers of adapters, 0.1 GB"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

# MkDocs with its theme Material, for `make site`.
setup-site: $(VENV)-site/stamp

$(VENV)-site/stamp: requirements/site.txt | $(UV)/stamp
	@echo "$(VENV)-site: MkDocs, 0.1 GB"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

# Validators of the files in deploy/: of Dockerfiles, compose files, Kubernetes manifests and job templates.
setup-deploy: $(VENV)-deploy/stamp

$(VENV)-deploy/stamp: requirements/deploy.txt | $(UV)/stamp
	@echo "$(VENV)-deploy: validators of the files in deploy/, 0.2 GB"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

# Slurm's daemons, for tests on a cluster of two nodes on this machine; root is not needed.
setup-slurm: $(VENV)-slurm/stamp

$(VENV)-slurm/stamp: tests/unpack_slurm.sh
	@echo "$(VENV)-slurm: Slurm, 15 MB"
	@rm -rf $(VENV)-slurm
	@bash $< $(VENV)-slurm
	@touch $@

# Playwright drives the Chromium of the system in tests of pages.
setup-browser: $(VENV)-browser/stamp

$(VENV)-browser/stamp: requirements/browser.txt | $(UV)/stamp
	@echo "$(VENV)-browser: Playwright, which drives Chromium, 0.2 GB"
	@$(call install,$(UV)) --no-deps --target $(@D) --requirements $<
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-* *.egg-info
