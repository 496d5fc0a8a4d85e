# make setup: a venv with everything. make test: lint, types, tests. make demo: the three commands on the packaged model.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1

.PHONY: setup test lint types unit demo clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' --config-settings editable_mode=strict
	touch $(STAMP)

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/pytest -q --cov=glm5_quant --cov-report=term:skip-covered

demo: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" sh benchmarks/demo.sh

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
