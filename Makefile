# Two commands: `make demo` and `make test`. Both first make .venv and install requirements into it.
# A machine with its own torch: `make demo PYTHON=python3 VENV=none` uses that Python as it is and installs nothing.

PYTHON ?= python3
VENV ?= .venv
ifeq ($(VENV),none)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
endif
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test_slow faults lint clean_demo

demo: $(VENV)/installed
	$(PY) demo/run.py

test: $(VENV)/installed_dev
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
	$(PY) -m pytest

test_slow: $(VENV)/installed_dev
	$(PY) -m pytest -m "slow and not gpu"

faults: $(VENV)/installed_dev
	$(PY) tests/faults/run.py

lint: $(VENV)/installed_dev
	$(PY) -m ruff check . && $(PY) -m ruff format --check .

clean_demo:
	rm -r runs/demo

.venv/installed: requirements.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q -U pip
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

# open-clip-torch carries CLIP's vocabulary; its dependencies would bring a second torchvision and are left out.
.venv/installed_dev: .venv/installed requirements-dev.txt requirements-data.txt
	.venv/bin/python -m pip install -q -r requirements-dev.txt -r requirements-data.txt
	.venv/bin/python -m pip install -q --no-deps 'open-clip-torch>=2.30'
	touch $@

none/installed none/installed_dev: ;
