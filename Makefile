# `make demo` and `make test` do all their own set-up; nothing is needed before them but Python >= 3.10.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REAL := $(VENV)/.ready-real
DOCS := $(VENV)/.ready-docs
TRITON := $(abspath $(VENV))/triton
TRITON_TESTS ?= not compile_all

.PHONY: help demo test test-real test-triton smollm2 bench docs lint types format clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train TAPE and RoPE on addition, compare them on one page
	@$(MAKE) --no-print-directory -j 2 runs/demo/tape/results.jsonl runs/demo/rope/results.jsonl
	$(BIN)/tape report runs/demo/tape runs/demo/rope --output runs/demo/report.html

# One thread each: the two runs share the machine side by side. An interrupted run goes on where it stopped.
runs/demo/%/results.jsonl: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/tape train configs/demo.yaml --model.encoding $* --output_dir runs/demo/$* --resume
	OMP_NUM_THREADS=1 $(BIN)/tape evaluate runs/demo/$*

test: $(READY)  ## run the whole test suite on two processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The large extras and the real model are only for this: the other targets do without them.
$(REAL): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,eval,gguf]'
	@touch $@

smollm2: $(REAL)  ## fetch a pretrained model, SmolLM2-135M-Instruct, once (93 MB); prints its folder
	@$(BIN)/python scripts/fetch_smollm2.py

test-real: smollm2  ## test with that model, with lm-evaluation-harness and with datasets
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "real or not real" -n 2 --dist worksteal tests/real \
		tests/language/test_harness.py tests/language/test_stream.py

bench: $(READY)  ## measure what encodings cost, check the targets, rewrite the tables of docs/performance.md
	rm -f runs/bench.jsonl
	$(BIN)/tape bench --threads 1 --output runs/bench.jsonl
	$(BIN)/tape bench --check --output runs/bench.jsonl; status=$$?; \
		cp runs/bench.jsonl results/bench.jsonl; $(BIN)/python experiments/tables.py; exit $$status

# Where Triton is installed torch compiles in other ways, so it lies in a folder that this target alone looks into.
$(TRITON)/.ready: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(TRITON) triton
	@touch $@

test-triton: $(TRITON)/.ready  ## test the Triton kernels without a GPU: interpreted, and compiled
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -n 2 --dist worksteal -m '$(TRITON_TESTS)' \
		tests/ops/test_triton.py tests/ops/test_triton_compile.py tests/benchmarks

$(DOCS): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(DOCS)  ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## static types
	$(BIN)/mypy

format: $(READY)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment, all runs and the built documentation
	rm -rf $(VENV) runs site
