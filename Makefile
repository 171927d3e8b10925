# Every target sets .venv up first; that costs nothing unless .venv is missing or the dependencies changed.
PYTHON ?= python3
PYTEST_ARGS ?=
BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.ready-docs
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench docs clean

help:  ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup: $(READY)  ## create .venv and install nwflow for development

demo: $(READY)  ## sample digits from their references, and say whether that works: a picture, a table, a report
	$(BIN)/nwflow demo

test: lint  ## all checks and all tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY)  ## style, formatting, import layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(READY)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## time, memory and error of the field against other ways to compute it
	$(BIN)/python benchmarks/field.py

docs: $(DOCS_READY)  ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict

clean:  ## remove .venv, caches and built files
	rm -rf .venv site dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "nwflow needs Python 3.10 or newer; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(PIP) -e ".[dev]"
	@touch $@

$(DOCS_READY): $(READY)
	$(PIP) -e ".[docs]"
	@touch $@
