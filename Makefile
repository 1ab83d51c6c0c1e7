# Everything runs in .venv, which the first target that needs it makes. PYTHON may name another interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format clean

demo: .venv/.installed
	$(BIN)/ostinato generate \
	  "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?" \
	  "Tom collects 125 stamps. He loses 17 of them and then gets 48 more. How many stamps does he have now?" \
	  "A box holds 6 pencils. Mia buys 8 boxes and gives 12 pencils to Leo. How many pencils does Mia have left?"

test: .venv/.installed-test
	$(BIN)/python -m pytest -n auto

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Ostinato needs Python 3.11 or newer; set PYTHON" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

# torch first, by its exact version, so that no other package chooses one.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet $(shell grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.installed-test: pyproject.toml constraints.txt .venv/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@
