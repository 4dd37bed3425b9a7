# One entry for people and for CI. Needs Python 3.11 or newer with pip, and GNU make; nothing else.
# Variables: PYTHON (which interpreter makes the environment), VENV (its folder), ARGS (more arguments for pytest).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.rlflow-installed
DEMO := examples/grpo_arithmetic.rlflow
DEMO_DATA := examples/data/arithmetic.jsonl

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-browser lint check bench validation headline clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(STAMP) ## Make .venv and install rlflow with everything for development

# Runs again only when what it installs from has changed. Some systems ship venv without ensurepip: there the
# interpreter's own pip fills the environment.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rlflow needs Python 3.11 or newer; say which with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@echo "[1/3] environment in $(VENV), from $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VENV)
	@echo "[2/3] installing; the first time downloads torch and Ray, which takes some minutes"
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e ".[dev]"; \
	else \
		$(PYTHON) -m pip --python $(BIN)/python install --disable-pip-version-check -c constraints.txt -e ".[dev]"; \
	fi
	@touch $@
	@echo "[3/3] done: $(BIN)/rlflow is ready"

demo: $(STAMP) $(DEMO_DATA) ## Learn small sums with GRPO on this machine
	$(BIN)/rlflow run $(DEMO)

$(DEMO_DATA): | $(STAMP)
	$(BIN)/python examples/make_arithmetic.py

test: $(STAMP) ## Run all tests (ARGS="-k graph" runs some)
	$(BIN)/python -m pytest $(ARGS)

test-browser: $(STAMP) ## Run the tests of the HTML report in headless Chromium, where that is installed
	$(BIN)/python -m pytest --browser tests/browser -rs $(ARGS)

lint: $(STAMP) ## Check style, format, types and who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## What CI runs

bench: $(STAMP) ## Run the benchmarks
	@for file in benchmarks/*.py; do \
		test -e "$$file" || { echo "there are no benchmarks"; break; }; \
		echo "== $$file"; $(BIN)/python "$$file" || exit 1; \
	done

validation: $(STAMP) ## Fit the cost model to published runs and write docs/validation.md
	$(BIN)/python -m benchmarks.validation

headline: $(STAMP) ## Simulate Pangu Ultra MoE on supernodes and write docs/headline.md
	$(BIN)/python -m benchmarks.headline --again

clean: ## Remove caches and build outputs; keeps .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
