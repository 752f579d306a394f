# The commands of a newcomer and of a developer; `make help` lists them.
# Every target sets up what it needs first (scripts/setup.sh), and does nothing twice.
SHELL := /bin/bash
BIN := .venv/bin
BUILD := build/dev
JOBS ?= $(shell nproc)
# Idle OpenMP threads sleep instead of spinning: on a machine with other load, spinning made the demo 5 times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup env demo test test-cpp test-python format format-check lint clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env:  # system packages, .venv and the pinned Python packages
	@scripts/setup.sh env

setup:  ## Install what is missing, build libplait, the command and the Python package
	@scripts/setup.sh

demo: setup  ## Train LLaMA with SDPA, plait and IHA on the best device of this machine (about 3 minutes)
	$(BIN)/python -m plait.bench llama --preset tiny --device auto --out demo-out

test: setup test-cpp test-python  ## All tests for this machine

test-cpp: setup
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(JOBS)

test-python: setup
	$(BIN)/python -m pytest

format: env  ## Rewrite C++ and Python in the project's format
	git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h' | xargs $(BIN)/clang-format -i
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: env
	git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lint: format-check setup  ## Check format, include directions and, on files that differ from HEAD, clang-tidy
	$(BIN)/python scripts/check_includes.py
	scripts/tidy.sh HEAD

clean:  ## Remove what was built (.venv stays; remove it by hand for a fresh start)
	rm -rf build dist demo-out .pytest_cache .ruff_cache .hypothesis
