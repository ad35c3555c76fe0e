# Everything on a bare machine, in a virtual environment of its own (.venv):
#
#   make quickstart   install, then the whole story here: text, LLaMA, LoRA, exam, pictures
#   make test         install and run the tests (make test-fast leaves out the slow ones)
#   make test-weekly  further rows of the large matrices, whose kind a row of make test covers
#   make test-avx2    the tests that notice the processor, as on one without AVX-512
#   make fresh        install what the README says into an empty environment and train there
#   make corners      a few trainings with the oldest and the newest Megatron of the table
#   make dependencies tests with the lowest and the newest packages that pyproject.toml allows
#   make frameworks   train inside frameworks, in environments of their own (build/frameworks)
#   make release      build a release, try its wheel in an empty environment, upload nothing
#   make mutants      break the code at more than 500 places and see that tests notice (weekly)
#
# Both install only what is missing. Settings:
#   PYTHON=python3.11           interpreter for the environment (3.10 or newer)
#   VENV=.venv                  where the environment lives
#   TORCH_INDEX=https://...     where torch comes from; https://download.pytorch.org/whl/cpu is small
#   WORKERS=auto                processes that share the tests; auto: one more than cores, at most 8
#   ARGS="-k ring"              further arguments for pytest or mindspeed quickstart

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= auto
ARGS ?=

# Each of hundreds of processes would compile the package anew where the environment says so.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# A file of tests shares its preparation on one worker; files go out in tests/conftest.py's order.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile \
	--no-loadscope-reorder
PIP := $(BIN)/python -m pip install --disable-pip-version-check

# Files whose results rest on kernels that other processors have otherwise.
OTHER_PROCESSOR := tests/ops/test_quant_gmm.py tests/training/test_parity.py \
	tests/megatron_lm/test_core_script.py tests/lora/test_layouts.py \
	tests/moe/test_deepspeed_figures.py

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-fast test-weekly test-avx2 test-cuda fresh corners dependencies \
	frameworks mutants lint docs release clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

install: $(VENV)/.suite

quickstart: $(VENV)/.suite
	$(BIN)/mindspeed quickstart $(ARGS)

test: $(VENV)/.test
	$(PYTEST) $(ARGS)

test-fast: $(VENV)/.test
	$(PYTEST) -m "not slow" $(ARGS)

test-weekly: $(VENV)/.test
	$(PYTEST) --weekly $(ARGS)

# The same on an older processor, without VNNI and AVX-512.
test-avx2: $(VENV)/.test
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
		$(PYTEST) -m "not slow" $(OTHER_PROCESSOR)

# What needs an NVIDIA GPU; all other tests hide it.
test-cuda: $(VENV)/.test
	$(PYTEST) -m cuda -n 1 $(ARGS)

fresh: $(VENV)/.torch
	$(BIN)/python tools/fresh_environment.py --torch-index "$(TORCH_INDEX)"

corners: $(VENV)/.test
	$(BIN)/python tools/megatron_versions.py --check --measure 0.12.1 0.19.0 \
		--only tensor-pipeline optimizer-pipeline experts-alltoall mla-context resume-optimizer

dependencies: $(VENV)/.test
	$(BIN)/python tools/dependency_versions.py --measure lowest newest

frameworks: $(VENV)/.test
	$(BIN)/python tools/frameworks.py --torch-index "$(TORCH_INDEX)" --measure $(or $(ONLY),ms-swift verl mbridge mcore-bridge megatron-bridge)

mutants: $(VENV)/.test
	$(BIN)/python tools/mutants.py $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tools/feature_table.py --check
	$(BIN)/python tools/operator_table.py --check
	$(BIN)/python tools/pipeline_tables.py --check
	$(BIN)/python tools/moe_tables.py --check
	$(BIN)/python tools/upstream_page.py --check
	$(BIN)/python tools/migrating_page.py --check
	$(BIN)/python tools/type_versions.py --check
	$(BIN)/python tools/torch_versions.py --check
	$(BIN)/python tools/megatron_versions.py --check
	$(BIN)/python tools/dependency_versions.py --check
	$(BIN)/python tools/frameworks.py --check
	$(BIN)/python tools/hardware_table.py --check
	$(BIN)/python tools/structure.py

docs: $(VENV)/.lint
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release: $(VENV)/.release
	$(BIN)/python tools/release.py --torch-index "$(TORCH_INDEX)" $(ARGS)

clean:
	rm -rf "$(VENV)" build site *.egg-info

# torch first and alone: the rest of the installation then keeps the build chosen here.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is %d.%d: make PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@echo "==> virtual environment $(VENV)"
	@$(PYTHON) -m venv "$(VENV)"
	@echo "==> PyTorch, about a minute"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.suite: EXTRAS = suite,plot
$(VENV)/.test: EXTRAS = test
$(VENV)/.lint: EXTRAS = test,lint,docs
$(VENV)/.release: EXTRAS = release
$(VENV)/.suite $(VENV)/.test $(VENV)/.lint $(VENV)/.release: \
		$(VENV)/.torch pyproject.toml constraints.txt mindspeed/__init__.py
	@echo "==> mindspeed with $(EXTRAS)"
	@$(PIP) -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@
