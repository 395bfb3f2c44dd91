# `make train` and `make test` do all the set-up on a machine that has only Python 3.11 and make.
PYTHON ?= python3
# Any requirement that pip takes: another version, or a wheel that suits your GPU driver.
TORCH ?= torch==2.13.0
# More arguments for train.py, e.g. make train ARGS="--trainer.max_steps 100 --data.path my_texts"
ARGS ?=
# More arguments for pytest, e.g. make test PYTEST_ARGS="-k mesh"
PYTEST_ARGS ?=
# Test processes: one per core, up to four. Each starts up to eight ranks; a file's tests stay in one process.
WORKERS ?= auto --maxprocesses 4 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install train test test-all lint bench docs clean

help:
	@echo 'make train     train a small GPT with tensor and pipeline parallelism over four processes (CPU) or GPUs'
	@echo 'make test      ruff, mypy and the fast tests'
	@echo 'make test-all  the same with every combination of cases'
	@echo 'make bench     steps beside other implementations (docs/performance.md), bytes of activations beside formulas'
	@echo 'make docs      build the documentation into site/'
	@echo 'make clean     remove the environment and caches; runs/ stays'

install: $(VENV)/.installed

# torch comes first and alone; everything else is then held to that version. Otherwise pip may replace a torch that
# came from elsewhere (a CPU build, a vendor's wheel), and gigabytes of CUDA packages come with the replacement.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "make: $(PYTHON) is Python %d.%d, but 3.11 or newer is needed. Try: make PYTHON=python3.11 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip list --format=freeze | grep '^torch==' > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --constraint $(VENV)/constraints.txt --editable ".[plots,test]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --constraint $(VENV)/constraints.txt --editable ".[docs]"
	@touch $@

# Four ranks (two stages of two tensor ranks) if the machine has four GPUs, two tensor ranks if it has two or three, and
# four processes on the CPU otherwise, one thread each: ranks that start a thread per core would fight for the same cores.
train: $(VENV)/.installed
	@gpus=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); \
	config=tp2_pp2.yaml; device="--trainer.accelerator cpu"; \
	if [ $$gpus -ge 2 ]; then device=""; fi; \
	if [ $$gpus -eq 2 ] || [ $$gpus -eq 3 ]; then config=tp2.yaml; fi; \
	set -x; OMP_NUM_THREADS=1 $(BIN)/python examples/gpt/train.py fit --config examples/gpt/$$config $$device $(ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

test-all: lint
	$(BIN)/python -m pytest -n $(WORKERS) --all-cases $(PYTEST_ARGS)

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.benchmarks --write
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.activations

docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
