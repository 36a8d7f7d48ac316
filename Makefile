# Each target sets up what it needs: python3 (3.10 or later, with venv) is all that must be there.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
ARGS   ?=
# A worker of pytest-xdist for each processor; the tests of one file share fixtures.
PARALLEL := -n auto --dist loadfile

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help test test-all lint format demo demo-reshape demo-failures bench peers soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(READY) ## run the tests; ARGS="-m 'not ranks'" leaves out those that start processes
	$(RUN) -m pytest $(PARALLEL) $(ARGS)

test-all: $(READY) ## run every test, with many more examples each, and ten minutes of `make soak`
	$(RUN) -m pytest $(PARALLEL) -m "" --hypothesis-profile=long $(ARGS)
	$(RUN) -m tests.soak.soak --minutes 10

lint: $(READY) ## check style and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(READY) ## put the code into its one style
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

demo: $(READY) ## show what shardwise does, in a minute and a half
	$(RUN) examples/demo.py $(ARGS)

demo-reshape: $(READY) ## lose workers of DeepSpeed and Megatron-Core, and go on with fewer
	$(RUN) examples/reshape.py $(ARGS)

demo-failures: $(READY) ## lose processes and hosts, and go on from memory; needs root
	$(RUN) examples/failures.py $(ARGS)

bench: $(READY) ## measure against the peers and the machine's own limits
	$(RUN) -m benchmarks.run $(ARGS)

peers: $(READY) ## install the peers that benchmarks compare with; those that are absent are left out
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[peers]'

soak: $(READY) ## kill, lose and restore for as long as asked: ARGS="--minutes 60"
	$(RUN) -m tests.soak.soak $(ARGS)

clean: ## remove everything that was made here
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch first and alone: it is the one that must not be chosen by what others ask for.
$(READY): pyproject.toml constraints.txt
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(RUN) -m pip install --quiet --constraint constraints.txt \
		--editable '.[test,dev,examples,frameworks]'
	@touch $@
