# make demo    four agents on a real model, three systems, on the CPU
# make test    what CI runs: ruff, pyright, pytest
# Each sets up what it needs in .venv; PYTHON=/path/to/python chooses the interpreter.

PY := .venv/bin/python
PYTEST_ARGS ?= --numprocesses=2 --dist=loadfile

.PHONY: demo test lint test-only clean

demo: .venv/run.stamp
	$(PY) -m experiments.serve --config=configs/demo.py

test: lint test-only

lint: .venv/dev.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

test-only: .venv/dev.stamp
	$(PY) -m pytest $(PYTEST_ARGS)

.venv/run.stamp: pyproject.toml .ci/setup
	@PYTHON="$(PYTHON)" sh .ci/setup models,plots
	@touch $@

.venv/dev.stamp: pyproject.toml .ci/setup
	@PYTHON="$(PYTHON)" sh .ci/setup dev
	@touch $@ .venv/run.stamp

clean:
	rm -rf .venv out .pytest_cache .ruff_cache .hypothesis
