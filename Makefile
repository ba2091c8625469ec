# `make demo` and `make test` need Python 3.11 or newer and make; each sets up what it needs in
# .venv (the second time that takes no time). Other goals: check, clean.
PYTHON ?= python3
VENV ?= .venv
OUT ?= videokv-demo
DEMO_ARGS ?=
TEST_ARGS ?=

# Without an NVIDIA GPU the CPU build of PyTorch is taken (its local version "+cpu" sorts above the
# CUDA build of the same number); where that index cannot be reached pip says so and goes on with
# the default one. With a GPU the newest build within pyproject's range is taken.
HAVE_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(HAVE_GPU),yes)
TORCH ?= torch
TORCH_INDEX ?=
else
TORCH ?= torch==2.13.0
TORCH_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu --retries 1 --timeout 15
endif

BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp
	$(BIN)/videokv demo --out $(OUT) $(DEMO_ARGS)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 $(TEST_ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/torch.stamp:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"videokv needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}: run make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_INDEX) "$(TORCH)"
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
