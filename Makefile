# Two commands for a newcomer: `make test` and `make demo`. Each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Where this is set (images of containers have it), every process would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-full lint imported demo docs benchmark format clean

# A worker for each core; one that has nothing left takes tests of another.
test: $(READY)
	$(MAKE) --jobs 2 lint imported
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not unchecked and not full"
	JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "unchecked and not full"

# What is heavy: Inductor, FlexAttention, memory at full size, every kernel compiled.
test-full: test
	JAXTYPING_DISABLE=1 $(BIN)/python -m pytest -m full

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What tests import is compiled once for all workers, while another core checks types.
imported: $(READY)
	-@$(BIN)/python -m pytest -n 0 --collect-only -m "not unchecked and not full" > /dev/null

demo: $(READY)
	$(BIN)/tisa-lab demo --out demo

# The pages of docs/ as a site in site/; a broken link is an error.
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

benchmark: $(READY)
	$(BIN)/python benchmarks/attention.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# pip's check for a newer pip asks the network for nothing that we need; most of what it would compile is never imported.
$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'tisa needs Python 3.11 or newer; set PYTHON='"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]" -e "./lab[cluster]"
	touch $(READY)

clean:
	rm -rf .venv demo site
