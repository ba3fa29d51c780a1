# Two commands set everything up: `make demo` and `make test`. Both make .venv, from the wheels of PyPI alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_VENV := .venv-torch
VLLM_VENV := .venv-vllm
# Where PyTorch's CPU build is; PyPI's for Linux is the CUDA build.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
.DEFAULT_GOAL := help
# Tests start hundreds of processes: each would compile all modules.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test lint types pytest check docs pages test-torch test-vllm test-engines versions times replay mutate campaign forms bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(f"kvgen needs Python 3.11 or newer; this is {sys.version.split()[0]}. Set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[build,cu13]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[build,cu13,sass,test]'
	@touch $@

# NVRTC's oldest versions of the declared range, as libraries: 220 MB, loaded by processes of their own.
.venv-nvrtc/got: tests/versions/under.py $(VENV)/installed-test
	$(BIN)/python -m tests.versions.under --get-old
	@touch $@

$(TORCH_VENV)/installed: tests_torch/requirements.lock pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 \
		--extra-index-url $(TORCH_INDEX) $$(grep '^torch==' tests_torch/requirements.lock)
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests_torch/requirements.lock
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VLLM_VENV)/installed: tests_vllm/requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 \
		--extra-index-url $(TORCH_INDEX) $$(grep '^torch==' tests_vllm/requirements.lock)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests_vllm/requirements.lock
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# Sphinx in an environment of its own: it reads text, and needs nothing of kvgen.
$(VENV)-docs/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))' > $(VENV)-docs/requirements.txt
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)-docs/requirements.txt
	@touch $@

demo: $(VENV)/installed ## build, compile, run and check Llama 3.1 8B's cache; no GPU needed
	$(BIN)/kvgen demo

ifdef OP
test: $(VENV)/installed-test ## lint, types, generated files in sync, tests; OP=decode: only the tests of one operation
	$(BIN)/python -m pytest -n auto --dist worksteal --op $(OP) tests/ops tests/reference tests/verify tests/golden_gpu tests/errors
else
test: lint types check pytest
endif

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/mypy

check: $(VENV)/installed-test
	$(BIN)/kvgen check

pytest: $(VENV)/installed-test .venv-nvrtc/got
	$(BIN)/python -m pytest -n auto --dist worksteal

test-torch: $(TORCH_VENV)/installed ## tests of kvgen.torch, in an environment of their own with PyTorch (1.4 GB); those of transformers under every known version too, and under the newest
	$(TORCH_VENV)/bin/python -m pytest tests_torch -n auto --maxprocesses 4 --dist worksteal
	$(TORCH_VENV)/bin/python -m tests_torch.other_transformers

test-vllm: $(VLLM_VENV)/installed ## tests of kvgen inside vLLM's engine, in an environment of their own (4.1 GB)
	$(VLLM_VENV)/bin/python -m pytest tests_vllm

test-engines: test-torch test-vllm ## both; KVGEN_RECORD_ENGINES=1 writes what they showed into docs/engines/status.json

docs: $(VENV)-docs/installed ## the documentation as a site, docs/_build/index.html; warnings are errors
	$(VENV)-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs docs/_build

pages: $(VENV)/installed-test ## write what README and docs take from code and runs
	$(BIN)/python -m docpages

versions: $(VENV)/installed-test ## lowest and highest version of every range in environments of their own, on each Python from 3.11 to 3.14 that is there: a table; ONLY='3.13-*' for some
	$(BIN)/python -m tests.versions $(ONLY)

times: $(VENV)/installed-test .venv-nvrtc/got ## pytest, and where its CPU time goes: NVRTC, translation, host compiler, execution; by folder
	$(BIN)/python -m pytest -n auto --dist worksteal -p tests.time_split

replay: $(VENV)/installed-test ## generated/ at BASE=<revision> against what the specs render: the same machine code? otherwise what changed
	$(BIN)/python -m benchmarks.replay $(or $(BASE),$(error BASE: say which revision, as in make replay BASE=main))

mutate: $(VENV)/installed-test ## single-line mutations of the templates; tests that execute the line must kill each
	$(BIN)/python -m tests.mutate

campaign: $(VENV)/installed-test .venv-nvrtc/got ## drawn specs, all pairs of the family, a share of the full grid, compiled as for a GPU; KVGEN_DRAWN_SEED=2, KVGEN_FAMILY=300, KVGEN_GRID=full:1/20 for others
	KVGEN_DRAWN=$${KVGEN_DRAWN:-100} $(BIN)/python -m pytest tests/ops -n auto --dist worksteal -k drawn
	KVGEN_DRAWN=$${KVGEN_DRAWN:-100} $(BIN)/python -m pytest tests/schema/test_storage.py tests/models/test_hostile.py tests/pages/test_machine.py -n auto --dist worksteal
	KVGEN_FAMILY=$${KVGEN_FAMILY:-300} $(BIN)/python -m pytest tests/ops/test_family.py tests/ops/test_seal.py -n auto --dist worksteal
	KVGEN_FAMILY=1 $(BIN)/python -m pytest tests/ops/test_sets.py -k covers_every_pair
	KVGEN_FAMILY=1 $(BIN)/python -m pytest tests/ops/test_append.py tests/ops/test_gather.py tests/ops/test_decode.py tests/ops/test_hostile.py tests/ops/test_fused.py tests/ops/test_transformers*.py -n auto --dist worksteal
	KVGEN_FAMILY=1 $(BIN)/python -m pytest tests/ops/test_extend*.py tests/ops/test_split.py tests/ops/test_plan.py tests/ops/test_decode_masks.py tests/ops/test_decode_rows.py tests/ops/test_decode_scales.py tests/ops/test_decode_page_lists.py tests/ops/test_scaled_rows.py tests/ops/test_power_scales.py tests/ops/test_mla_*.py tests/ops/test_indexer_candidates.py tests/accessor/test_bytes.py tests/models/test_prompts.py tests/models/test_recorded.py tests/compressed tests/golden_gpu -n auto --dist worksteal
	KVGEN_FAMILY=1 $(BIN)/python -m pytest tests/forms -n auto --dist worksteal
	KVGEN_FAMILY=1 $(BIN)/python -m pytest @tests/forms/alike.txt -n auto --dist worksteal
	KVGEN_FAMILY=1 $(BIN)/python -m pytest -m campaign -n auto --dist worksteal
	KVGEN_FAMILY=1 $(BIN)/python -m pytest tests/test_run_gpu*.py tests/verify/test_families.py tests/verify/test_cases.py tests/cli/test_bench*.py tests/cli/test_demo.py -n auto --dist worksteal
	KVGEN_GARBAGE=$${KVGEN_GARBAGE:-2000} $(BIN)/python -m pytest tests/ops/test_workspace.py -n auto --dist worksteal
	KVGEN_GRID=$${KVGEN_GRID:-full:0/20} $(BIN)/python -m pytest tests/accessor -n auto --dist worksteal
	$(BIN)/python -m tests.versions.kernels --every
	for version in $$($(BIN)/python -m tests.versions.under --old); do $(BIN)/python -m tests.versions.under $$version tests.versions.kernels --every || exit 1; done

forms: $(VENV)/installed-test ## which test executes which form of kernel, as drawn specs have them: writes tests/forms/executed.txt and chosen.txt (an hour of two cores)
	rm -f build/forms.json
	$(BIN)/python -m pytest tests/ops tests/compressed tests/models/test_recorded.py -n auto --dist worksteal -p tests.forms.record
	KVGEN_FAMILY=1 $(BIN)/python -m pytest tests/ops/test_extend*.py tests/ops/test_split.py tests/ops/test_decode_scales.py tests/ops/test_decode_page_lists.py tests/ops/test_scaled_rows.py tests/ops/test_mla_*.py tests/ops/test_indexer_candidates.py tests/compressed -n auto --dist worksteal -p tests.forms.record
	$(BIN)/python -m tests.forms

bench: $(VENV)/installed-test ## cost of calls, compiling and rendering on this machine
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/call_cost.py
	$(BIN)/python benchmarks/emulator_speed.py

clean: ## remove what the commands above made
	rm -rf $(VENV) $(VENV)-docs .venv-nvrtc build/versions $(TORCH_VENV) $(VLLM_VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache
