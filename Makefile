# make setup: a virtual environment with everything.  make test: lint, types, tests, as CI runs them.
# make demo: the three commands on the packaged model.
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LINKED := $(VENV)/.linked
FILES := $(VENV)/.files
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1
export PYTHONSAFEPATH := 1
export HF_HUB_OFFLINE := 1

.PHONY: setup test lint types unit demo clean FORCE

setup: $(LINKED)

$(INSTALLED): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PIP) torch==2.13.0 'setuptools>=77'
	$(PIP) -e '.[dev]' --config-settings editable_mode=strict
	touch $@

# The strict editable install, which mypy needs, links files one by one: a new or deleted file means linking again.
$(FILES): $(INSTALLED) FORCE
	@find quant kernels model calibrate eval cli src -name '*.py' | LC_ALL=C sort > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(LINKED): $(FILES)
	$(PIP) --no-deps --no-build-isolation -e . --config-settings editable_mode=strict
	touch $@

FORCE:

test: lint types unit

lint: $(LINKED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(LINKED)
	$(BIN)/mypy

unit: $(LINKED)
	$(BIN)/pytest -q --cov=glm5_quant --cov-report=term:skip-covered

demo: $(LINKED)
	PATH="$(abspath $(BIN)):$$PATH" sh benchmarks/demo.sh

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
