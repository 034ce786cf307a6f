# make demo    the main job, on this Python's standard library or on INPUT=path
# make test    the whole test suite          make check       lint, types, layers
# make bench   the figures                   make wheel-test  the suite against the built wheel

PYTHON ?= python3
VENV ?= .venv
INPUT ?=
TESTS ?= tests

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
WHEEL := build/wheel
.DEFAULT_GOAL := help
.PHONY: help demo test check bench wheel-test clean

help:
	@sed -n '1,3s/^# //p' Makefile

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

# The tests run beside a copy of everything they read, so that only the wheel can provide the packages.
wheel-test:
	rm -rf $(WHEEL)
	mkdir -p $(WHEEL)/tree
	@$(PYTHON) -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir $(WHEEL)/dist .
	@wheel=$$(echo $(WHEEL)/dist/*.whl) && \
	    $(WHEEL)/venv/bin/python -m pip install -qq --disable-pip-version-check "$$wheel[dev]"
	cp -R $(filter-out synchronizer notifications readergroup build dist demo-output,$(wildcard *)) $(WHEEL)/tree
	cd $(WHEEL)/tree && ../venv/bin/pytest $(TESTS) --quiet

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
