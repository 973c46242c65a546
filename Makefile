# make demo and make test do all their own set-up; nothing outside this folder is touched, save that `make test`,
# run as root on Debian, installs etcd-server when no etcd is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
DEMO_ARGS ?= --ranks 4 --nodes 2 --controllers 2 --seconds 200 --json out.json
TEST_ARGS ?=

.PHONY: demo test lint venv bench etcd clean help

help:
	@echo "make demo   serve a real MoE model, shift its traffic, watch EPlane level it (about 5 minutes)"
	@echo "make test   lint and tests"
	@echo "make lint   ruff, mypy --strict, import rules"
	@echo "make bench  benchmarks, side by side in one run"
	@echo "make venv   only the virtual environment, with all that development needs"

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "EPlane needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -U 'pip>=24'
	touch $@

# torch first and alone: a looser requirement elsewhere must not choose another build.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	$(PIP) install -q 'torch==$(shell sed -n 's/^torch==//p' constraints.txt)' numpy -c constraints.txt
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo

venv: $(VENV)/.dev

demo: $(VENV)/.demo
	$(BIN)/eplane demo $(DEMO_ARGS)

etcd:
	@sh deploy/etcd-for-tests.sh

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint etcd
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest $(TEST_ARGS)

bench: $(VENV)/.dev
	$(BIN)/python tests/bench/run.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache out.json out.png
