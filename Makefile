# One entry for people and for CI. Needs Python 3.11 or newer with pip, and GNU make; nothing else.
# Variables: PYTHON (which interpreter makes the environment), VENV (its folder), ARGS (more arguments for pytest).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.rlflow-installed
NPU_VENV ?= .venv-npu
NPU_STAMP := $(NPU_VENV)/.rlflow-installed
NPU_STUBS := $(abspath $(NPU_VENV))/cann-stubs
DEMO := examples/grpo_arithmetic.rlflow
DEMO_DATA := examples/data/arithmetic.jsonl

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-browser test-npu lint check bench validation headline clean

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

# Two processes, a file in one of them: many tests wait for processes that they start.
test: $(STAMP) ## Run all tests (ARGS="-k graph" runs some)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-browser: $(STAMP) ## Run the tests of the HTML report in headless Chromium, where that is installed
	$(BIN)/python -m pytest --browser tests/browser -rs $(ARGS)

test-npu: $(NPU_STAMP) ## Check every torch_npu call against the real package, without an NPU (Linux, gcc)
	LD_LIBRARY_PATH=$(NPU_STUBS) RLFLOW_NPU_STUBS=$(NPU_STUBS) $(NPU_VENV)/bin/python -m pytest tests/npu $(ARGS)

# An environment of its own: beside torch_npu, every `import torch` needs CANN's libraries, or the stand-ins that
# tests/npu/cann_stubs.py makes. torch_npu refuses a CUDA build of torch, which is what PyPI has for x86-64.
$(NPU_STAMP): pyproject.toml constraints.txt tests/npu/cann_stubs.py tests/npu/cann_stubs.c
	@command -v gcc >/dev/null && command -v nm >/dev/null || { echo "make test-npu needs gcc and nm (binutils)"; exit 1; }
	@echo "[1/3] environment in $(NPU_VENV)"
	@test -x $(NPU_VENV)/bin/python || $(PYTHON) -m venv $(NPU_VENV) 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(NPU_VENV)
	@echo "[2/3] installing torch (CPU), torch_npu and rlflow; the first time takes some minutes"
	@pip="$(NPU_VENV)/bin/python -m pip"; $$pip --version >/dev/null 2>&1 || pip="$(PYTHON) -m pip --python $(NPU_VENV)/bin/python"; \
	install="$$pip install --disable-pip-version-check -q -c constraints.txt"; \
	{ $$install "torch==2.13.0+cpu" || \
	  { echo "the CPU build of torch is not found: give PyTorch's index for CPU builds in PIP_EXTRA_INDEX_URL"; exit 1; }; } && \
	$$install "torch-npu==2.13.0" -e ".[run]" pytest pytest-timeout
	@echo "[3/3] stand-ins for CANN's libraries"
	@$(NPU_VENV)/bin/python tests/npu/cann_stubs.py $(NPU_STUBS)
	@touch $@

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

clean: ## Remove caches and build outputs; keeps .venv, .venv-npu and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(NPU_VENV)/*' -prune -exec rm -rf {} +
