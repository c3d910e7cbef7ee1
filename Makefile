PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROMPT ?= import unittest

.PHONY: demo test check format numbers clean

demo: $(VENV)/.installed
	$(BIN)/paceline generate -p "$(PROMPT)" --max-tokens 160

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/update_numbers.py --check

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

numbers: $(VENV)/.installed
	$(BIN)/python scripts/update_numbers.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[serve]'
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test,dev]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
