# nftctl: `make demo` shows it, `make test` proves it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Compiled modules are kept, also where the surroundings say otherwise: ranks and commands are started by the hundred.
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test soak check lint format types completions docs base scenes clean

help:  ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.run  ## Install, train the embedded model, show the reward rising
	$(BIN)/nftctl launch scenes_t2i_cpu

test: $(VENV)/.dev  ## Every test that CI runs
	$(PYTEST) -n 2 --dist loadgroup --no-loadscope-reorder --durations 15 --durations-min 5 -m "not soak and not gpu"

soak: $(VENV)/.dev  ## Long campaigns: kills, faults, storage, three seeds of learning
	$(PYTEST) -m soak --timeout 3600

check: $(VENV)/.dev lint types  ## Everything but the tests
	$(BIN)/lint-imports
	$(BIN)/python -m nftctl.cli.reference --check .
	git ls-files -z '*.sh' .ci/run | xargs -0 -r $(BIN)/shellcheck

lint: $(VENV)/.dev  ## Format and lint, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.dev  ## Format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.dev  ## Check types
	$(BIN)/mypy

completions: $(VENV)/.dev  ## Write the shell completions anew
	$(BIN)/python -m nftctl.cli.completion completions

docs: $(VENV)/.dev  ## Write the reference page, the JSON Schema and the README's generated parts anew
	$(BIN)/python -m nftctl.cli.reference .

base: $(VENV)/.dev  ## Pretrain the base of the digits anew (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m nftctl.model.tiny.recipe

scenes: $(VENV)/.dev  ## Pretrain the base of the scenes anew (minutes on a GPU)
	$(BIN)/python -m nftctl.model.scenes.recipe --device cuda
	$(BIN)/python benchmarks/scenes_check.py --device cuda

clean:  ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
