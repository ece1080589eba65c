# `make train` and `make test` are the two commands of the README. Each makes .venv, installs what it needs, and runs.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
# what is installed for contributors; each choice has a stamp of its own
EXTRAS ?= dev
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
PACKAGING := settings.ini setup.py constraints.txt
export PYTHON
unexport PYTHONDONTWRITEBYTECODE  # pip compiles nothing here: what is imported is, once, as it is first used

.PHONY: help train test lab dev export notebooks readme
help: ## this list
	@awk -F ':.*## ' '/^[a-z]*:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

train: .venv/.runtime ## train with the shipped model and positions: make train ARGS="--steps 20 --seed 1"
	@$(BIN)/rookworld train $(ARGS)

test: .venv/.$(EXTRAS) ## every test: all notebooks, then tests/ (extra arguments for pytest: ARGS="-k cli")
	@bash .ci/test $(ARGS)

lab: .venv/.$(EXTRAS) ## open JupyterLab on the notebooks, as trusted ones: it shows their stored boards
	@cd nbs && ../$(BIN)/jupyter trust *.ipynb > /dev/null && ../$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

dev: .venv/.$(EXTRAS) ## install what contributors need

export: .venv/.$(EXTRAS) ## write rookworld_nb/ from the notebooks
	@bash .ci/export

notebooks: .venv/.$(EXTRAS) ## execute every chapter, store its outputs, clean it (one: ARGS=nbs/05_rewards.ipynb)
	@bash .ci/notebooks $(ARGS)

readme: .venv/.$(EXTRAS) ## write README.md from nbs/index.ipynb
	@$(BIN)/python .ci/readme

# The environment. Stamp files keep repeated calls quick; a change of the packaging files installs again.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rookworld_nb needs Python 3.11 or newer, and $(PYTHON) is " \
	  + sys.version.split()[0] + ": name another with make PYTHON=python3.12")'
	@bash .ci/debian python3-venv:python3-venv:"the virtual environment of $(PYTHON)"
	@$(PYTHON) -m venv --clear .venv

# torch comes first and pinned, so that pip takes the build that is at hand and never looks for another
define install
@echo "Installing rookworld_nb$(1) into .venv (once; torch is the large part)"
@$(PIP) install --no-compile -c constraints.txt $(TORCH)
@$(PIP) install --no-compile -c constraints.txt -e '.$(1)'
@touch $@
endef

.venv/.runtime: $(PACKAGING) | $(BIN)/python
	$(call install,)

.venv/.$(EXTRAS): $(PACKAGING) | $(BIN)/python
	$(call install,[$(EXTRAS)])
	@touch .venv/.runtime $(if $(findstring dev,$(EXTRAS)),.venv/.dev)
