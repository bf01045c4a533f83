# What a person types: `make demo` and `make test`. Both make the virtual environment they need.
SHELL := /bin/bash
PYTHON ?= python3
# The exact release: an open range can pull gigabytes of CUDA packages on a machine without a GPU.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Training seconds of the demo.
BUDGET_S ?= 300
export TWOSTROKE_HOME ?= $(CURDIR)/runs/home
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test soak lint docs clean

$(VENV)/.run: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed (Debian: apt-get install python3 python3-venv)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer with its venv module is needed (Debian: apt-get install python3-venv); set PYTHON=..." >&2; exit 2; }
	@echo "Making $(VENV) (a minute the first time) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable .
	@touch $@

# Installing built the native library; sources that have changed since are built again. Without a compiler torch does its work.
$(VENV)/.native: $(VENV)/.run setup.py $(wildcard src/twostroke/kernels/native/*.cpp src/twostroke/kernels/native/*.h)
	-@$(BIN)/python -m twostroke.kernels.native_library build >/dev/null
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install --quiet --editable ".[test,lint]"
	@touch $@

demo: $(VENV)/.native
	$(BIN)/twostroke demo --budget-s $(BUDGET_S)

test: $(VENV)/.test $(VENV)/.native
	$(BIN)/python -m pytest -q --durations=15

soak: $(VENV)/.test $(VENV)/.native
	$(BIN)/python -m pytest -q -m soak --timeout=7200

lint: $(VENV)/.test
	$(BIN)/lint-imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_plan_schema.py
	$(BIN)/python docs/generate_claims.py

clean:
	rm -rf $(VENV) runs build src/*.egg-info
