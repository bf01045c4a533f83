# What a person types: `make demo` and `make test`. Both make the virtual environment they need.
SHELL := /bin/bash
PYTHON ?= python3
# Versions to keep to: what CI tested. `make LOCK=` takes the newest that pyproject.toml admits.
LOCK ?= requirements.lock
VENV := .venv
BIN := $(VENV)/bin
# Training seconds of the demo.
BUDGET_S ?= 300
# Processes of `make test`.
TEST_PROCESSES ?= 3
export TWOSTROKE_HOME ?= $(CURDIR)/runs/home
export PIP_DISABLE_PIP_VERSION_CHECK := 1
install := $(PYTHON) install/environment.py "$(VENV)" --lock "$(LOCK)"

.PHONY: demo test check unit soak lint docs lock clean python

python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed (Debian: apt-get install python3 python3-venv)" >&2; exit 2; }

$(VENV)/.run: pyproject.toml $(wildcard $(LOCK)) | python
	@$(install)
	@touch $@

# Installing built the native library; sources that have changed since are built again. Without a compiler torch does its work.
$(VENV)/.native: $(VENV)/.run setup.py $(wildcard src/twostroke/kernels/native/*.cpp src/twostroke/kernels/native/*.h)
	-@$(BIN)/python -m twostroke.kernels.native_library build >/dev/null
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@$(install) --extra test --extra lint
	@touch $@

# lm-eval and Ray beside the rest, for the tests that hold our scores against the one and run replicas on the other.
$(VENV)/.eval: $(VENV)/.test
	@$(install) --extra test --extra lint --extra eval --extra ray
	@touch $@

demo: $(VENV)/.native
	$(BIN)/twostroke demo --budget-s $(BUDGET_S)

# Under a minute on two cores: style, types and contracts beside the unit tests that state properties and need no model.
UNIT := $(addprefix tests/,core ledger scheduling bench/test_definitions.py cli/test_doctor_verb.py data/test_filters.py \
	data/test_permutation.py evaluation/test_bits.py packaging/test_metadata.py $(patsubst %,planner/test_%.py,cost crossover \
	hardware params serving_plan training_plan))

check: $(VENV)/.test $(VENV)/.native
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

unit: $(VENV)/.test $(VENV)/.native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(UNIT)

# Files are shared out among processes of one thread each, in the order of their names: a file's tests share its fixtures.
# Those that need all cores follow, in one process; only files that have such tests are read again.
test: $(VENV)/.test $(VENV)/.native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=15 -m "not soak and not alone" \
	    --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -q --durations=5 -m "alone and not soak" $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

soak: $(VENV)/.eval $(VENV)/.native
	$(BIN)/python -m pytest -q -m soak --timeout=7200

lint: $(VENV)/.test
	$(BIN)/lint-imports
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror src/twostroke/kernels/native/*.cpp src/twostroke/kernels/native/*.h tests/kernels/*.cpp
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/python docs/generate.py

# After .ci/run has passed with newer versions (make LOCK= ...): these are the tested ones from now on.
lock: $(VENV)/.eval
	$(BIN)/python install/lock.py

clean:
	rm -rf $(VENV) runs build src/*.egg-info
