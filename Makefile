# Each target does all its own set-up. PYTHON is the interpreter (3.11 or newer) that the environment is made from.
# pip's own variables are honoured: where the default index offers no CPU build of torch, set PIP_EXTRA_INDEX_URL to one
# that does.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?= smollm2
BUCKET ?=
PYTEST_ARGS ?=
TRL_VERSIONS ?= 1.14.2 1.15.0
VLLM_VERSIONS ?= 0.33.0
WHOLE_RUNS := $(addprefix tests/integration/,test_demo.py test_demo_buckets.py test_examples.py)

.PHONY: help env demo test matrix trl-versions vllm-versions docs-check figures aot lint format clean

help:
	@echo "make demo               train SmolLM2-135M with TRL, serve it with vLLM, sync by deltas (6 to 15 minutes)"
	@echo "make demo MODEL=tiny    the same with a generated model (under 4 minutes after the environment exists)"
	@echo "make demo BUCKET=…      through another bucket than a folder: hf://buckets/…, s3://…, gs://…, az://…"
	@echo "make test               lint and all tests"
	@echo "make matrix             every model with every number of ranks, eager and compiled, against fresh servers"
	@echo "make trl-versions       the tests of the trainers with TRL $(TRL_VERSIONS) (TRL_VERSIONS=… for others)"
	@echo "make vllm-versions      the tests of the servers with the code of vLLM $(VLLM_VERSIONS) (VLLM_VERSIONS=… for others)"
	@echo "make docs-check         run every command of README and docs, with real servers and trainers (6 minutes)"
	@echo "make figures            draw the pictures of the docs and copy their numbers from benchmarks/results"
	@echo "make aot                compile every GPU kernel for sm_80, sm_90 and sm_100, no GPU needed, and check them"
	@echo "make env                only the environment, in $(VENV)"

env: $(READY)

$(READY): requirements/cpu.txt pyproject.toml tools/make_env.sh
	PYTHON="$(PYTHON)" bash tools/make_env.sh "$(VENV)"
	touch $@

demo: $(READY)
	$(BIN)/python examples/quickstart_cpu.py --model $(MODEL) $(if $(BUCKET),--bucket "$(BUCKET)") $(DEMO_ARGS)

# what starts servers and trainers comes after the rest, two at a time because all of it waits a lot: whole runs one by
# one, and then files, whose tests share a server
test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS) tests/kernels tests/properties tests/unit
	$(BIN)/python -m pytest -n 2 --dist load $(PYTEST_ARGS) $(WHOLE_RUNS)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) tests/integration $(addprefix --ignore=,$(WHOLE_RUNS))

matrix: $(READY)
	$(BIN)/python -m pytest tests/integration/test_matrix.py tests/integration/test_shards.py tests/integration/test_rank_trainers.py \
		tests/integration/test_rank_adapters.py tests/integration/test_trainers.py tests/integration/test_adapters.py \
		tests/integration/test_layouts.py -m "matrix or not matrix" $(PYTEST_ARGS)

trl-versions: $(READY)
	$(BIN)/python tools/trl_versions.py $(TRL_VERSIONS) $(PYTEST_ARGS)

vllm-versions: $(READY)
	$(BIN)/python tools/vllm_versions.py $(VLLM_VERSIONS) $(PYTEST_ARGS)

docs-check: $(READY)
	$(BIN)/python tools/docs_check.py --full

figures: $(READY)
	$(BIN)/python tools/figures.py

aot: $(READY)
	$(BIN)/python tools/aot.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	bash tools/typecheck.sh "$(VENV)"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info runs .cache
