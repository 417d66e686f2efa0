# Two commands on a machine that has Python 3.11 or newer, pip, venv and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo compare test test-all lint benchmark clean

demo: $(VENV)/run-ready
	rm -rf private-run
	$(BIN)/python examples/train_privately.py --out private-run

compare: $(VENV)/run-ready
	$(BIN)/python examples/compare_methods.py

test: lint
	$(BIN)/python -m pytest -n 2

test-all: lint
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" --hypothesis-profile thorough

lint: $(VENV)/dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/run-ready
	$(BIN)/python benchmarks/flops.py
	$(BIN)/python benchmarks/tape_overhead.py
	$(BIN)/python benchmarks/accounting.py

# torch goes first and alone: the constraint then names the build that every later package finds already there.
$(VENV)/run-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) --editable ".[plot]"
	touch $@

$(VENV)/dev-ready: $(VENV)/run-ready
	$(PIP) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
