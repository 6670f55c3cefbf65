# make run    train a small agent on this machine     make test   all tests
# make lint   ruff and mypy                           make docs   the generated pages
# PYTHON and PIP_ARGS can be set, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" where the
# default index has CUDA builds of torch only.
PYTHON ?= python3.11
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install run test lint docs clean

run: $(INSTALLED)
	$(BIN)/pearl train examples/quickstart.yaml $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m pearl.config.reference docs/configuration.md

install: $(INSTALLED)

# One environment from the lock; made anew when the lock or the metadata changes.
$(INSTALLED): requirements/cpu.lock setup.cfg
	@$(PYTHON) -c 'import sys; assert sys.version_info[:2] == (3, 11), "Python 3.11 is needed (set PYTHON=...), this is " + sys.version'
	@echo "setting up $(VENV) from requirements/cpu.lock (a few minutes, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r requirements/cpu.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch; assert torch.version.cuda is None, "this torch is a CUDA build; see README, Install"'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
