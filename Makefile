# Daily commands. Each sets itself up: a virtual environment in $(VENV), rebuilt when
# pyproject.toml changes.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# worksteal: files stay whole, so that what a file starts once is started once.
PYTEST_ARGS ?= -n 2 --dist worksteal

# Modules are compiled once, not by each of the processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo serve test lint format bench docs

help: ## Show the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing lazydecode and what it needs into $(VENV) (several minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

install: $(STAMP) ## Create the virtual environment

test: $(STAMP) ## Run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy --strict and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(STAMP) ## Build a tiny model, serve it, and send it real media twice
	$(BIN)/lazydecode demo

serve: $(STAMP) ## Serve MODEL=path-or-hub-id
	@test -n "$(MODEL)" || { echo "usage: make serve MODEL=path-or-hub-id"; exit 2; }
	$(BIN)/lazydecode serve $(MODEL)

bench: $(STAMP) ## Measure the short form (under 5 minutes) and write the page on performance
	$(BIN)/python benchmarks/run_short.py

docs: $(STAMP) ## Write the reference pages from the code and build the site into site/
	$(BIN)/python docs/generate.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/mkdocs build --quiet
