# `make demo` shows what gshard does, `make test` checks that it does it.
# All targets set up their own virtual environment from nothing but Python, pip and make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
GSHARD := $(VENV)/bin/gshard
# One process more than cores: some tests wait for another process, a browser or a clock.
JOBS := $(shell $(PYTHON) -c "import os; print(1 + min(os.cpu_count(), 15))")

# Bytecode is kept even where the environment says otherwise: dozens of tests start a Python.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo layer test quick slow test-all test-matrix test-torch lint format docs site clean

# Real text to BLEU: gather, train 8 experts on 8 virtual devices, evaluate, translate, report.
# Interrupted, it continues where it stopped.
demo: $(VENV)/installed
	$(GSHARD) data gather --tier tiny --out demo/corpus
	$(GSHARD) train tiny --corpus demo/corpus --out demo/run train.steps=800 train.minutes=4 \
	    vocabulary.languages=pt,es,fr,it,ca
	$(GSHARD) evaluate demo/run --sentences 60 --untrained
	printf '%s\n' "El archivo no existe." "Le nom de la personne" "Seleziona una immagine." \
	    "A data do evento" "Voleu esborrar aquesta pàgina?" | $(GSHARD) translate demo/run
	$(GSHARD) report demo/run

# The paper's MoE layer, what moves between its devices and why, beside XLA's partitioner.
layer: $(VENV)/installed
	$(RUN) examples/moe_layer.py

# The type checker needs one core for half a minute: the tests begin meanwhile.
test: $(VENV)/installed
	$(MAKE) --jobs 2 lint quick

quick: $(VENV)/compiled
	$(RUN) -m pytest -n $(JOBS) --dist loadgroup

# Everything: all cases, the slow tests, more examples, and PyTorch, to the end whatever fails.
test-all: $(VENV)/installed
	@began=$$(date +%s); $(MAKE) --keep-going lint slow test-torch; status=$$?; \
	    echo "make test-all: $$((($$(date +%s) - began) / 60)) minutes"; exit $$status

slow: $(VENV)/installed
	$(RUN) -m pip install --quiet --editable '.[dev,slow,third-party,export,torch]'
	$(RUN) -m pytest -n $(JOBS) --dist loadgroup -m "slow or not slow" \
	    --hypothesis-profile thorough

# The quick tests under JAX 0.10 to 0.12 and the newest release on the index, each in an environment
# of its own (JAX=0.12, JAX=newest: only that).
test-matrix: $(VENV)/installed
	$(RUN) -m tools.matrix $(if $(JAX),--jax $(JAX))

# PyTorch's modules, and one model of Hugging Face: in an environment of its own, since the extras
# huggingface (transformers 5) and export (transformers 4) exclude each other.
test-torch:
	$(PYTHON) -m venv .venvs/torch
	.venvs/torch/bin/python -m pip install --quiet --editable '.[dev,huggingface]'
	.venvs/torch/bin/python -m pytest -n $(JOBS) -m "slow or not slow" \
	    tests/contrib tests/comparing/test_torch_step.py
	.venvs/torch/bin/python -m benchmarks.torch_models llama

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(RUN) -m tools.hygiene
	$(RUN) -m tools.structure --check

format: $(VENV)/installed
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The pages that are made from the code.
docs: $(VENV)/installed
	$(RUN) -m gshard.rules --update
	$(RUN) -m tools.jit_table --update
	$(RUN) -m tools.api --update
	$(RUN) -m tools.stability --update
	$(RUN) -m tools.badges --update

# The pages of docs/ as a site in build/site, with search. A warning is an error.
site: $(RUN)
	$(RUN) -m pip install --quiet --editable '.[docs]'
	$(RUN) -m sphinx -W --keep-going -q -b html docs build/site

$(RUN):
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(RUN)
	$(RUN) -m pip install --quiet --no-compile --upgrade pip  # an older one answers tools.matrix otherwise
	$(RUN) -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@

# Bytecode of what tests import, and of the tests: each process would compile all of it by itself.
$(VENV)/compiled: $(VENV)/installed
	-$(RUN) -m pytest --collect-only --quiet >/dev/null  # what is wrong, the tests say
	touch $@

clean:
	rm -rf $(VENV) .venvs build *.egg-info .mypy_cache .pytest_cache .ruff_cache
