# make run   environment, pinned dependencies, then the quick start (a comparison on handwritten digits)
# make test  the whole test suite
# make check linters and types
# make docs  the documentation as a site, in site/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

METHODS := fedavg dp-fedavg dp-fedsam dp-fedpgn dp-fedpgn-ls

.PHONY: run test check docs clean

run: $(VENV)/run.stamp
	$(BIN)/fedflat compare $(addprefix quick-start-,$(METHODS)) --seeds 3 --out runs/quick-start

test: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs site
	@echo "site/index.html"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("fedflat needs Python 3.11 or newer; found %d.%d. Name one: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,language,federation,scale]'
	touch $@ $(VENV)/run.stamp

$(VENV)/docs.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[docs]'
	touch $@ $(VENV)/run.stamp

clean:
	rm -rf $(VENV) runs build site *.egg-info
