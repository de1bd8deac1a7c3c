# Two commands: `make demo` shows what gshard does, `make test` checks that it does it.
# Both set up their own virtual environment from nothing but Python, pip and make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-all lint format clean

demo: $(VENV)/installed
	$(RUN) examples/moe_layer.py

test: lint
	$(RUN) -m pytest -n 2

test-all: lint
	$(RUN) -m pytest -n 2 -m "slow or not slow"

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/installed
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
