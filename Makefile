# Each target makes .venv and installs what it needs, from nothing, with pip. PYTHON is the interpreter to build on.
PYTHON ?= python3
BIN := .venv/bin
# Not --quiet: PyTorch is large, and pip shows what it downloads.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PICTURES ?= build/demo

.PHONY: help demo test test-all test-gpu check docs docs-serve records format clean

help:
	@echo "make demo      the RoPE of a config, proven correct and fast, and pictures; CONFIG=path for your own"
	@echo "make test      the tests that take minutes"
	@echo "make test-all  all tests that need no GPU (what CI runs)"
	@echo "make test-gpu  all tests marked gpu, and those of the kernels and backends, on a CUDA device"
	@echo "make check     ruff (format, lint) and pyright"
	@echo "make docs      docs/ and the API reference as a site in build/docs, strictly; make docs-serve serves it"
	@echo "make records   the measured figures in README.md and docs/, from benchmarks/*.json"

.venv/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"ropewalk needs Python 3.11 or later, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@echo "making .venv"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/python pyproject.toml setup.py constraints.txt $(wildcard src/ropewalk/kernels/native/*.[ch])
	@echo "installing ropewalk (PyTorch comes with it: the first time takes minutes)"
	@$(PIP) -e '.[cli,plots]'
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "installing the tools for tests and checks"
	@$(PIP) -e '.[dev]'
	@$(PIP) --upgrade --no-deps --target .venv/alone timm torchtitan spmd_types # requirements: torchvision for CUDA, datasets
	@touch $@

.venv/installed-docs: .venv/installed
	@echo "installing what builds the pages"
	@$(PIP) -e '.[docs]'
	@touch $@

demo: .venv/installed
	@$(BIN)/ropewalk demo $(if $(CONFIG),"$(CONFIG)" )--plots $(PICTURES)

test: .venv/installed-dev
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --hypothesis-profile=quick -m "not slow and not gpu"

test-all: .venv/installed-dev
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not gpu"

test-gpu: .venv/installed-dev
	@$(BIN)/python -m pytest -m gpu
	@# These run in Triton's interpreter where there is no CUDA device, and on the device where there is one.
	@$(BIN)/python -m pytest -m "not gpu" tests/kernels/test_triton_*.py tests/kernels/test_backends.py

check: .venv/installed-dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

docs: .venv/installed-docs
	@# Not --quiet: it drops the warnings before --strict has counted them.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built: open build/docs/index.html in a browser; it needs no server"

docs-serve: .venv/installed-docs
	@# The flag is the default, which mkdocs 1.6 loses with click 8.3.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --livereload

records: .venv/installed
	@$(BIN)/python benchmarks/render.py

format: .venv/installed-dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
