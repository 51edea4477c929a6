# Everything a developer or CI does. `make help` lists it. CI runs `.ci/run`, which runs `make test`.

PYTHON ?= python3
# Where torch comes from, e.g. TORCH_PIP_ARGS="--index-url URL" for wheels without CUDA.
TORCH_PIP_ARGS ?=
# Of `make run`: the model, the first question, more flags of `expertmesh serve`.
MODEL ?= demo
ASK ?= What is the capital of France?
ARGS ?=
# Of `make test` and `make test-all`: more flags of pytest, and how many tests run side by side.
PYTEST_ARGS ?=
TEST_JOBS ?= 2

# Of `make conformance-full`: where the clients are installed; a folder that has them is used as is.
CONFORMANCE_CLIENTS ?= .venv-conformance

VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# Tests run side by side, a file at a time and long files first; then those that watch the clock while
# several processes work, which have the machine to themselves.
pytest = $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder \
  -m "$(1) and not alone" tests/parity tests/integration tests/conformance tests/unit tests/chaos tests/cluster tests/manifests $(PYTEST_ARGS) && \
  $(BIN)/python -m pytest -m "$(1) and alone" $(ALONE) $(PYTEST_ARGS)
# Files with tests that have the machine to themselves: collecting all others takes long.
ALONE = $(sort $(shell grep -rl --include='test_*.py' 'mark\.alone' tests))
# What tests need first. Static checks leave cores idle, on which kernels are compiled meanwhile.
prepare = $(MAKE) --no-print-directory -j 3 lint type imports proto-check \
  kernels-attention-worker kernels-expert-worker
PROTOS := $(wildcard proto/expertmesh/v1/*.proto)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv install run test test-all chaos test-gpu conformance-full check lint fmt type imports proto proto-check bench bench-mesh bench-scale bench-rpc bench-overlap bench-scrape family-table docs

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "%-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is not Python 3.11 or newer" >&2; \
	    echo "fix: name one that is, e.g. make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV): torch first, then the rest"
	$(BIN)/python -m pip install $(TORCH_PIP_ARGS) $(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[gateway,worker]'
	@touch $@

$(VENV)/.dev-stamp: $(VENV)/.run-stamp
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[gateway,k8s,worker,dev]'
	@touch $@

venv: $(BIN)/python ## Make the virtual environment in .venv

install: $(VENV)/.dev-stamp ## Install ExpertMesh and the developer's tools

run: $(VENV)/.run-stamp ## Serve the demo model on this machine, until Ctrl-C
	@$(BIN)/expertmesh serve $(MODEL) --ask "$(ASK)" $(ARGS)

test: ## What CI runs: static checks, then the tests
	@$(prepare)
	@$(call pytest,not slow and not gpu and not chaos)

test-all: ## As test, with what takes longer
	@$(prepare)
	@$(call pytest,not gpu and not chaos)

kernels-%: $(VENV)/.dev-stamp
	@PYTHONPATH=.:kernels $(BIN)/python -m tests.support.precompile $*

chaos: $(VENV)/.dev-stamp ## Kill, stop, cut off and misuse workers under load; print what clients saw
	@$(BIN)/python -m pytest -m chaos tests/chaos tests/cluster $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev-stamp ## The kernels for GPUs, on one; needs a CUDA device and a torch for it
	@$(BIN)/python -c 'import torch; torch.cuda.is_available() or exit("error: torch finds no CUDA device")'
	@TRITON_INTERPRET=0 $(BIN)/python -m pytest -m "not slow" tests/gpu tests/unit/kernels/triton $(PYTEST_ARGS)

CLIENTS := litellm lm_eval guidellm aiperf

conformance-full: $(VENV)/.dev-stamp $(CLIENTS:%=$(CONFORMANCE_CLIENTS)/%/.stamp) $(CONFORMANCE_CLIENTS)/node/.stamp ## Conformance tests with every client; installs 4 GB
	@CONFORMANCE_CLIENTS=$(abspath $(CONFORMANCE_CLIENTS)) \
	  $(BIN)/python -m pytest tests/conformance $(PYTEST_ARGS)

$(CONFORMANCE_CLIENTS)/%/.stamp: tests/conformance/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	@if grep -q '^torch' $<; then $(@D)/bin/python -m pip install -q $(TORCH_PIP_ARGS) $(TORCH); fi
	$(@D)/bin/python -m pip install -q -r $<
	@touch $@

$(CONFORMANCE_CLIENTS)/node/.stamp: tests/conformance/node/package-lock.json
	@mkdir -p $(@D) && cp tests/conformance/node/package.json $< $(@D)
	@if command -v npm >/dev/null; then npm ci --no-audit --no-fund --prefix $(@D); \
	  else echo "npm is not installed: the clients in Node are skipped"; fi
	@touch $@

check: test ## Same as test

lint: $(VENV)/.dev-stamp ## Style and format of Python and protos
	@$(BIN)/ruff check -q --no-cache . # the cache does not see that a module became ours
	@$(BIN)/ruff format -q --check . || { echo "fix: make fmt" >&2; exit 1; }
	@$(BIN)/buf lint

fmt: $(VENV)/.dev-stamp ## Format and fix what can be fixed
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

type: $(VENV)/.dev-stamp ## mypy, strict
	@$(BIN)/mypy

imports: $(VENV)/.dev-stamp ## Which package may import which
	@PYTHONPATH=.:kernels $(BIN)/lint-imports

define generate
	@$(BIN)/python -m grpc_tools.protoc -I proto \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

proto: $(VENV)/.dev-stamp ## Generate code from proto/
	$(call generate,.)

proto-check: $(VENV)/.dev-stamp ## Fail if the generated code is not that of proto/
	@rm -rf build/proto-check && mkdir -p build/proto-check
	$(call generate,build/proto-check)
	@diff -r -x __pycache__ -x __init__.py build/proto-check/expertmesh/v1 expertmesh/v1 || \
	  { echo "fix: make proto" >&2; exit 1; }

bench: $(VENV)/.dev-stamp ## Measure the kernels
	@PYTHONPATH=.:kernels $(BIN)/python bench/bench_kernels.py $(ARGS)

bench-mesh: $(VENV)/.dev-stamp ## Measure meshes against the colocated mode
	@PYTHONPATH=.:kernels $(BIN)/python -m bench.mesh $(ARGS)

bench-scale: $(VENV)/.dev-stamp ## Measure what grows with delay, expert workers, layers, rows
	@PYTHONPATH=.:kernels $(BIN)/python -m bench.scale $(ARGS)

bench-rpc: $(VENV)/.dev-stamp ## Measure dispatch and combine against echoes over gRPC and plain sockets
	@PYTHONPATH=.:kernels $(BIN)/python -m bench.rpc $(ARGS)

bench-overlap: $(VENV)/.dev-stamp ## Measure when two micro-batches pay, against the model
	@PYTHONPATH=.:kernels $(BIN)/python -m bench.overlap $(ARGS)

bench-scrape: $(VENV)/.dev-stamp ## Measure what scrapes of the metrics cost the event loop
	@PYTHONPATH=.:kernels $(BIN)/python -m bench.scrape $(ARGS)

docs: $(VENV)/.dev-stamp ## Write the pages of docs/ that are made from the code
	@PYTHONPATH=.:kernels $(BIN)/python -m tests.support.reference

PARITY_RESULTS := build/parity-results

family-table: $(VENV)/.dev-stamp ## Compare every family with transformers; put the figures into both READMEs
	@mkdir -p $(dir $(PARITY_RESULTS)) && rm -f $(PARITY_RESULTS)
	@PARITY_RESULTS=$(abspath $(PARITY_RESULTS)) \
	  $(BIN)/python -m pytest -m "not slow and not gpu" -k transformers \
	  tests/parity/test_families.py $(PYTEST_ARGS)
	@PYTHONPATH=.:kernels $(BIN)/python -m tests.support.family_table $(PARITY_RESULTS) README.md README.zh-CN.md
