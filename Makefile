# The one list of commands: people, hooks and .ci/run call these targets.
# A fresh machine needs Python >= 3.11, make and a C compiler; every target does its own set-up.

VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
# Extra arguments of `make serve`, `make bench` (flags) and `make test` (pytest arguments).
ARGS    ?=
# The first interpreter that is new enough; `make PYTHON=/path/to/python setup` overrides it.
PYTHON  ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
             $(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))

# Triton reads TRITON_INTERPRET when a kernel module is imported: these tests get a process of their own.
TRITON_TESTS = $(shell find tests/kernels -name 'test_*triton*.py' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format typecheck bench docs-check

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv and install everything that serving and testing need

# The constraints pin torch as well: without them pip may choose a build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Spark needs Python 3.11 or newer; point PYTHON=... at one" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(STAMP) ## serve spark-tiny on 127.0.0.1:8000; ARGS="--port 9000" adds flags
	@exec $(BIN)/serve $(ARGS)

test: $(STAMP) ## run all tests; ARGS="tests/engine -k ladder" narrows them
ifneq ($(ARGS),)
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest $(addprefix --ignore=,$(TRITON_TESTS))
ifneq ($(TRITON_TESTS),)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(TRITON_TESTS)
endif
endif

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## mypy --strict
	$(BIN)/mypy
	$(BIN)/mypy --scripts-are-modules scripts/check_dashboard scripts/gpu_check

bench: $(STAMP) ## start a server, load it, report; ARGS="--url http://host:8000" measures another one
	@exec $(BIN)/spark bench $(or $(ARGS),--spawn)

docs-check: $(STAMP) ## run the README's commands and hold the docs against the tree
	$(BIN)/python -m pytest tests/test_readme.py tests/test_house.py
