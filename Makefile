# make run   environment, pinned dependencies, then the quick start (a comparison on handwritten digits)
# make test  the whole test suite; fails too where a branch of privacy/, pieces/ or a method's accounts was not taken
# make long  tests that wait for many processes or train for half a minute or more
# make documented  every command and program of README, docs and examples, as a user runs it
# make check linters, types and the measures of the house (tests/house.py)
# make docs  the documentation as a site, in site/
# make release  wheel, source, software bill of materials and checksums, in dist/
# make lock  constraints.txt anew: pins and hashes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Every file that is installed has a hash in constraints.txt; no package is built here but fedflat itself.
LOCKED := $(PIP) --require-hashes --only-binary :all: --constraint constraints.txt

METHODS := fedavg dp-fedavg dp-fedsam dp-fedpgn dp-fedpgn-ls

.PHONY: run test long documented check docs lock release clean

run: $(VENV)/run.stamp
	$(BIN)/fedflat compare $(addprefix quick-start-,$(METHODS)) --seeds 3 --out runs/quick-start

# Counting branches slows every test of a process, so only these count them; they reach every branch that has to be.
COUNTED := tests/privacy tests/pieces tests/core tests/engine/test_noise_laws.py tests/methods/test_class_statistics.py \
  $(patsubst %,tests/contracts/test_contract_%.py,correlated guard pieces state)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadscope --no-loadscope-reorder --max-worker-restart 0

# Of the second run's tests some wait for processes: one worker more than two cores.
test: $(VENV)/test.stamp
	$(PYTEST) -n 2 $(COUNTED) --cov
	$(PYTEST) -n 3 -m "not documented and not long" $(addprefix --ignore=,$(COUNTED))

long: $(VENV)/test.stamp
	$(PYTEST) -n 2 -m long tests

# One after the other, with every thread: what runs is what a user starts.
documented: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m documented --durations=10 tests/documented

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.house

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs site
	@echo "site/index.html"

release: $(VENV)/test.stamp $(VENV)/release.stamp
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . > $(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	$(BIN)/cyclonedx-py environment --validate --output-reproducible --pyproject pyproject.toml \
	  --output-format JSON --output-file dist/fedflat.cdx.json $(BIN)/python
	cd dist && sha256sum -- * > SHA256SUMS && cat SHA256SUMS

lock: $(VENV)/release.stamp
	.ci/lock

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("fedflat needs Python 3.11 or newer; found %d.%d. Name one: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# A directory has no hash: fedflat itself goes in first, alone, and what it needs then as a requirement of an installed package.
$(VENV)/own.stamp: pyproject.toml constraints.txt constraints-cpu.txt | $(BIN)/python
	sed -n '/^\(pip\|setuptools\)==/,/[^\]$$/p' constraints.txt > $(VENV)/installer.txt
	$(PIP) --require-hashes --only-binary :all: --requirement $(VENV)/installer.txt
	said=$$($(PIP) --require-hashes --no-deps --requirement constraints-cpu.txt 2>&1) || \
	  case "$$said" in *'No matching distribution'*|*ResolutionImpossible*) echo "torch: the public index's";; *) echo "$$said" >&2; exit 1;; esac
	PYTHONWARNINGS=ignore $(PIP) --no-index --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/run.stamp: $(VENV)/own.stamp
	$(LOCKED) fedflat
	touch $@

$(VENV)/test.stamp: $(VENV)/own.stamp
	$(LOCKED) 'fedflat[dev,language,federation,scale,onnx,vision,excel]'
	touch $@ $(VENV)/run.stamp

# For deploy/Containerfile.
$(VENV)/federation.stamp: $(VENV)/own.stamp
	$(LOCKED) 'fedflat[federation]'
	touch $@ $(VENV)/run.stamp

$(VENV)/docs.stamp: $(VENV)/own.stamp
	$(LOCKED) 'fedflat[docs]'
	touch $@ $(VENV)/run.stamp

$(VENV)/release.stamp: $(VENV)/own.stamp
	$(LOCKED) --group release
	touch $@

clean:
	rm -rf $(VENV) runs build dist site *.egg-info
