# The commands of a newcomer and of a developer; `make help` lists them.
# Every target sets up what it needs first (scripts/setup.sh), and does nothing twice.
SHELL := /bin/bash
BIN := .venv/bin
BUILD := build/dev
JOBS ?= $(shell nproc)
# Idle OpenMP threads sleep instead of spinning: on a machine with other load, spinning made the demo 5 times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup env demo test test-cpp test-python gpu-test gpu-sanitize bench format format-check lint clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env:  # system packages, .venv and the pinned Python packages
	@scripts/setup.sh env

setup:  ## Install what is missing, build libplait, the command and the Python package
	@scripts/setup.sh

demo: setup  ## Time a small LLaMA with SDPA, plait and IHA, train the last two (3 minutes after the set-up)
	$(BIN)/python -m plait.bench llama --preset tiny --device auto --out demo-out

test: setup test-cpp test-python  ## All tests for this machine

test-cpp: setup
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(JOBS)

test-python: setup
	$(BIN)/python -m pytest

gpu-test: ## The CUDA backends on this machine's GPU against the oracle, within 5 minutes (needs a build with CUDA)
	scripts/gpu_test.sh $(or $(SECONDS_MAX),300)

gpu-sanitize: ## memcheck, racecheck and synccheck of one kernel on small shapes: make gpu-sanitize KERNEL=mma_attention
	KERNEL=$(KERNEL) scripts/gpu_sanitize.sh

bench: setup  ## Measure on this machine's GPU and write bench/results: make bench SUITES="prefill backward iha"
	for suite in $(or $(SUITES),prefill backward iha); do $(BIN)/python -m plait.bench $$suite || exit 1; done

format: env  ## Rewrite C++ and Python in the project's format
	git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: env
	git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lint: format-check setup  ## Check format, include directions and, on files that differ from HEAD, clang-tidy
	$(BIN)/python scripts/check_includes.py
	scripts/tidy.sh HEAD

clean:  ## Remove what was built (.venv stays; remove it by hand for a fresh start)
	rm -rf build dist demo-out .pytest_cache .ruff_cache .hypothesis
