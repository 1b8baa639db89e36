# Each target first installs its requirements, only into .venv and the user's cache.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo demo-vllm test test-vllm test-engines test-ray test-docs check results clean

demo: $(VENV)/ready            ## capture, replay, fit, predict on the embedded engine: one HTML page
	$(PY) -m scripts.demo --engine sim --out out/demo

demo-vllm: $(VENV)/ready       ## the same on a real vLLM on this machine's CPU
	$(PY) -m scripts.demo --engine vllm --out out/demo-vllm

test: $(VENV)/ready            ## all tests without a real engine
	$(PY) -m pytest -n auto --dist worksteal -m "not vllm and not engines and not ray and not docs"

test-vllm: $(VENV)/ready       ## the tests against a real vLLM (KVTAPE_VLLM=http://host:port uses a running one)
	$(PY) -m scripts.vllm_engine test

test-engines: $(VENV)/ready    ## the tests against other real engines (KVTAPE_LLAMACPP, KVTAPE_SGLANG_URL=http://host:port: a running one)
	$(PY) -m scripts.llama_engine test
	$(PY) -m scripts.sglang_engine test

test-ray: $(VENV)/ready        ## the tests that start a Ray cluster on this machine
	$(PY) -m pytest -m ray

test-docs: $(VENV)/ready       ## the commands in the documentation
	$(PY) -m pytest -n 2 --dist worksteal -m docs

check: $(VENV)/ready           ## format, lint, types and tests: what a change must pass
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

results: $(VENV)/ready         ## forecasts compared with a real vLLM (about an hour); captures are kept
	$(PY) -m scripts.fidelity capture out/results
	$(PY) -m scripts.fidelity evaluate out/results

# Without a C compiler, Python runs the sources: all tests pass, slowly.
COMPILED := $(shell grep -o '"[^" ]*/[^" ]*[.]py"' setup.py | tr -d '"')

$(VENV)/ready: $(VENV)/installed setup.py $(COMPILED)
	$(PY) setup.py --quiet build_ext --inplace
	touch $@

$(VENV)/installed: pyproject.toml
	$$(scripts/find_python) -m venv $(VENV)
	# uv takes a quarter of pip's time; only pip reads a configured index. The target above compiles.
	{ $(PY) -m pip install --quiet uv && KVTAPE_PURE=1 $(PY) -m uv pip install --quiet --python $(PY) --editable '.[dev]'; } \
		|| KVTAPE_PURE=1 $(PY) -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis
