# make demo    four agents on a real model, three systems, on the CPU
# make test    what CI runs: ruff, pyright, pytest
# make test-all    the same with the slow tests: every smoke variant of the paper tables
# make test-gpu    the kernels without interpretation, and the engine's numerics, on a machine with a GPU
# Each of the first two sets up what it needs in .venv; PYTHON=/path/to/python chooses the interpreter.

PY := .venv/bin/python
PYTHON_GPU ?= python3
PYTEST_ARGS ?= --numprocesses=2 --dist=loadfile --no-loadscope-reorder
# Most of the suite's time is XLA compiling small programs: two workers leave no core to split one over, and
# what one has compiled the other reads from a folder that lives as long as the run.
TEST_XLA_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1
RUN_TESTS = programs=$$(mktemp -d) && trap 'rm -rf "$$programs"' EXIT && \
	JAX_COMPILATION_CACHE_DIR="$$programs" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1 \
	XLA_FLAGS="$(TEST_XLA_FLAGS)" $(PY) -m pytest

.PHONY: demo test lint test-only test-all test-gpu clean

demo: .venv/run.stamp
	$(PY) -m experiments.serve --config=configs/demo.py

test: lint test-only

lint: .venv/dev.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

test-only: .venv/dev.stamp
	$(RUN_TESTS) $(PYTEST_ARGS)

test-all: .venv/dev.stamp
	$(RUN_TESTS) -m "" $(PYTEST_ARGS)

test-gpu:
	$(PYTHON_GPU) -m pytest -o addopts= -rP tests/engine/test_gpu_numerics.py
	$(PYTHON_GPU) -m pytest -o addopts= tests/kernels

.venv/run.stamp: pyproject.toml .ci/setup
	@PYTHON="$(PYTHON)" sh .ci/setup models,plots
	@touch $@

.venv/dev.stamp: pyproject.toml .ci/setup
	@PYTHON="$(PYTHON)" sh .ci/setup dev
	@touch $@ .venv/run.stamp

clean:
	rm -rf .venv out .pytest_cache .ruff_cache .hypothesis
