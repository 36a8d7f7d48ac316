# Each target installs what it needs into .venv. It requires only python3, 3.10 or later, with venv.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
ARGS   ?=
LEGACY := packages/shardwise-legacy
AZURITE := 3.37.0
# Two pytest-xdist workers for each processor, because they wait for half of the time. Tests of a
# file share a worker, and its fixtures. tests/conftest.py orders the files: slow ones first.
# A worker that crashes ends the run: pytest-xdist 3.8 would replace it, and then wait forever.
WORKERS  := $(shell $(PYTHON) -c 'import os; print(min(16, 2 * (os.cpu_count() or 1)))')
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes. Without bytecode, each would compile the whole library again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help test test-all kernel azurite lint format dist docs demo demo-reshape demo-failures bench peers torchtitan nvrx nfs variations soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(READY) ## run the tests; ARGS="-m 'not ranks'" skips tests that start processes
	$(RUN) -m pytest $(PARALLEL) $(ARGS)

# The kernel needs torch, numpy, msgspec, isal, and no part: no other store, framework, agent, command.
KERNEL := .venv-kernel/bin/python
KERNEL_PACKAGES := numpy msgspec isal hypothesis pytest pytest-timeout
KERNEL_TESTS := tests/boxes tests/plan tests/manifest tests/state tests/engine tests/adapters \
	tests/store/test_local.py tests/store/test_sequential.py tests/ports/test_our_bindings.py \
	tests/ports/test_read_strategies.py tests/ports/test_rounds.py tests/ports/test_stores.py \
	tests/test_retention.py

kernel: .venv-kernel/.ready ## run the kernel's tests, with few packages; takes two minutes
	$(KERNEL) -m pytest $(KERNEL_TESTS) $(ARGS)

.venv-kernel/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-kernel
	$(KERNEL) -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(KERNEL) -m pip install --quiet --no-compile --constraint constraints.txt $(KERNEL_PACKAGES)
	$(KERNEL) -m pip install --quiet --no-deps --editable .
	@touch $@

# Those that need root are missing, because most machines of CI give none.
VARIATIONS := rounding ascii locale one-core tmpfs user

test-all: $(READY) azurite ## run all tests, more random examples, variations, benchmarks, soak
	$(RUN) -m pytest $(PARALLEL) -m "" --hypothesis-profile=long $(ARGS)
	NAMES="$(VARIATIONS)" $(MAKE) variations ARGS=
	$(MAKE) bench ARGS=--quick
	$(RUN) -m tests.soak.soak --minutes 10

# The server of Azure's blob storage. Without npm, its tests are skipped.
azurite:
	@test -x node_modules/.bin/azurite-blob || ! command -v npm >/dev/null || \
		npm install --no-save --no-package-lock --no-audit --no-fund --prefix . \
			azurite@$(AZURITE) || echo "azurite was not installed: the tests of Azure are skipped"

# Its packages need an older fsspec than the tests do, so torchtitan gets a separate environment.
torchtitan: $(READY) ## install torchtitan, which the tests of its drop-in need; they skip without it
	$(PYTHON) -m venv .venv-torchtitan
	.venv-torchtitan/bin/python -m pip install --quiet --constraint constraints.txt torch
	grep -v '^fsspec' constraints.txt > .venv-torchtitan/constraints.txt
	.venv-torchtitan/bin/python -m pip install --quiet --editable . torchtitan==0.3.0 \
		--constraint .venv-torchtitan/constraints.txt
	.venv-torchtitan/bin/python -m pip install --quiet --no-deps triton

nvrx: $(READY) ## install NVIDIA's wrapper for restarts, which a test needs; it skips without it
	$(PYTHON) -m venv .venv-nvrx
	.venv-nvrx/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-nvrx/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	.venv-nvrx/bin/python -m pip install --quiet --no-deps nvidia-resiliency-ext==0.4.1
	.venv-nvrx/bin/python -m pip install --quiet --constraint constraints.txt \
		packaging pyyaml defusedxml psutil nvidia-ml-py

# User Mode Linux runs the kernel's server and two clients in one process. Other tests of files run on
# the first client.
nfs: $(READY) ## run tests on NFS; needs user-mode-linux, nfs-kernel-server and nfs-common of Debian
	tests/nfs/run.sh $(RUN) -m "" tests/nfs tests/store/test_local.py tests/test_retention.py \
		tests/faults/test_kill.py tests/faults/test_jobs.py tests/faults/test_damage.py $(ARGS)

variations: $(READY) ## run tests with other rounding, locales, cores, users, …; some need root
	tests/variations.sh $(RUN) $(or $(ARGS),tests/boxes tests/state tests/manifest tests/adapters tests/cli)

lint: $(READY) ## check style and types
	$(RUN) -m ruff check
	$(RUN) -m ruff check --preview --select PLW1514  # files are UTF-8 in every locale
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(READY) ## format the code
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

dist: $(READY) ## build the source distributions and the wheels of both packages into dist/
	rm -rf dist
	$(RUN) -m build --outdir dist
	$(RUN) -m build --outdir dist $(LEGACY)

docs: $(READY) ## build the site of the documentation into site/
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "site/index.html is built; for its search, run: $(PYTHON) -m http.server -d site"

demo: $(READY) ## resume a run under three other parallelisms; takes a minute and a half
	$(RUN) examples/demo.py $(ARGS)

demo-reshape: $(READY) ## lose workers of DeepSpeed and Megatron-Core, and resume with fewer
	$(RUN) examples/reshape.py $(ARGS)

demo-failures: $(READY) ## lose processes and hosts, and resume from memory; needs root
	$(RUN) examples/failures.py $(ARGS)

bench: $(READY) ## compare with other libraries and with the machine's limits
	$(RUN) -m benchmarks.run $(ARGS)

peers: $(READY) ## install the libraries that `make bench` compares with; it skips missing ones
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[peers]'

soak: $(READY) ## inject random failures and check every restore: ARGS="--minutes 60"
	$(RUN) -m tests.soak.soak $(ARGS)

clean: ## remove .venv and all build and cache files
	rm -rf $(VENV) .venv-kernel .venv-torchtitan .venv-nvrx .venv-torch-2.9 .venv-torch-2.14 node_modules build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info $(LEGACY)/build $(LEGACY)/src/*.egg-info
	find src packages tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Install torch first, alone: the requirements of other packages must not choose its version. pip
# compiles on one processor only, so compile afterwards. Some packages contain templates that fail.
$(READY): pyproject.toml $(LEGACY)/pyproject.toml constraints.txt
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --no-compile --constraint constraints.txt torch
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(RUN) -m pip install --quiet --no-compile \
		--constraint constraints.txt --editable '.[test,dev,examples,frameworks]' --editable $(LEGACY)
	@$(RUN) -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
