# make demo    the main job, on this Python's standard library or on INPUT=path
# make test    the whole test suite          make check       lint, types, layers
# make bench   the figures                   make wheel-test  the suite against the built wheel
# make simulate SEEDS=n   whole groups under faults, in virtual time
# make chaos SCHEDULES=n  real processes, killed and stopped           make soak MINUTES=n  everything at once, for long

PYTHON ?= python3
VENV ?= .venv
INPUT ?=
TESTS ?= tests
SEEDS ?= 2000
SCHEDULES ?= 100
MINUTES ?= 30

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
WHEEL := build/wheel
.DEFAULT_GOAL := help
.PHONY: help demo test check bench simulate chaos soak wheel-test clean

help:
	@sed -n '1,5s/^# //p' Makefile

# Each stamp stands for one set of dependencies, and is as new as the pyproject.toml that was installed.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.x")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV)"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), with what the tests need"
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-bench: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), with what the benchmarks need"
	@$(PIP) --editable '.[dev,bench]'
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed-demo

demo: $(VENV)/.installed-demo
	@$(BIN)/readergroup demo $(if $(INPUT),"$$INPUT")

test: $(VENV)/.installed-dev
	$(BIN)/pytest $(TESTS) --quiet

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks

simulate: $(VENV)/.installed-dev
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos --schedules $(SCHEDULES) --jobs 2

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES)

# The tests run beside a copy of everything they read, so that only the wheel can provide the packages. What takes long
# is not run again: simulation and chaos say nothing about how the packages were built.
wheel-test:
	rm -rf $(WHEEL)
	mkdir -p $(WHEEL)/tree
	@$(PYTHON) -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir $(WHEEL)/dist .
	@wheel=$$(echo $(WHEEL)/dist/*.whl) && \
	    $(WHEEL)/venv/bin/python -m pip install -qq --disable-pip-version-check "$$wheel[dev]"
	cp -R $(filter-out synchronizer notifications readergroup build dist demo-output,$(wildcard *)) $(WHEEL)/tree
	cd $(WHEEL)/tree && ../venv/bin/pytest $(TESTS) --quiet --ignore tests/simulation --ignore tests/chaos

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
