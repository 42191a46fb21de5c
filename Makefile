# Everything a developer or CI does, by name. Each target first makes .venv as requirements.lock says; nothing is global.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO := build/demo
SECONDS ?= 60
REQUESTS ?= 2000
CLIENTS ?= 64
PROMPT ?= Write three short tips for someone who starts to learn the piano.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps
TORCH = $(shell grep '^torch==' requirements.lock)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo bench test lint fmt proto goldens bench-cpu bench-gpu test-gpu bench-verify fuzz bench-convert bench-vision bench-kimi test-page soak clean

help:  ## this list
	@echo "usage: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## .venv with every dependency at its locked version, and the three commands in .venv/bin

demo: $(READY) $(DEMO)/core  ## fetch a real model, export it with its draft, sign, verify and generate (PROMPT="...")
	$(BIN)/dflash-run verify $(DEMO)/core --trust $(DEMO)/trust.json
	$(BIN)/dflash-run generate $(DEMO)/core --trust $(DEMO)/trust.json --chat --prompt "$(PROMPT)"

test: $(READY)  ## the whole test suite (ARGS="tests/test_setup.py -k lock")
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

lint: $(READY)  ## ruff, mypy --strict on dflash_core and runtime, and the generated code against its schema
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/gen_proto.py --check

fmt: $(READY)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .

proto: $(READY)  ## generate proto/dflash_core/v1/*_pb2.py(i) from the schema
	$(BIN)/python scripts/gen_proto.py

goldens: $(READY)  ## add what is missing in tests/golden: a small signed core of this release
	$(BIN)/python scripts/update_goldens.py

test-gpu: $(READY)  ## the tests that need an NVIDIA GPU
	$(BIN)/pytest -m gpu $(ARGS)

bench-gpu: $(READY) $(DEMO)/target $(DEMO)/key.pem  ## the demo pair on an NVIDIA GPU, beside z-lab's loop, as JSON on stdout
	@$(BIN)/python scripts/bench_gpu.py

bench: $(READY) $(DEMO)/core  ## measure the demo core, sign the result, draw it and verify it (build/bench)
	mkdir -p build/bench
	$(BIN)/dflash-run bench $(DEMO)/core --trust $(DEMO)/trust.json --scenario c1 --scenario startup \
	  --out build/bench/result.json --plot build/bench/result.svg --sign $(DEMO)/key.pem
	$(BIN)/dflash-run verify build/bench/result.json --trust $(DEMO)/trust.json

bench-cpu: $(READY)  ## speed and memory of the demo pair on this CPU, as JSON on stdout
	@$(BIN)/python scripts/bench_cpu.py

bench-verify: $(READY)  ## speed of verifying a 2 GiB core, of structure checks and of a signature, as JSON on stdout
	@$(BIN)/python scripts/bench_verify.py

test-page: $(READY)  ## the debug server's page in headless Chromium, which must be installed; pictures in build/page
	$(BIN)/pytest tests/browser/check_page.py $(ARGS)

soak: $(READY) $(DEMO)/core  ## 64 clients, 2,000 requests against the demo pair: wrong outputs, leaks, drain (REQUESTS=2000 CLIENTS=64)
	$(BIN)/python scripts/soak.py --requests $(REQUESTS) --clients $(CLIENTS)

fuzz: $(READY)  ## coverage-guided fuzzing of every reader of untrusted bytes (SECONDS=60 for each)
	$(BIN)/python scripts/fuzz.py --seconds $(SECONDS)

bench-convert: $(READY)  ## conversion speed beside torchao's and a plain copy's, as JSON on stdout
	@$(BIN)/python scripts/bench_convert.py

bench-vision: $(READY)  ## speed of images, from a JPEG to embeddings, on this CPU, as JSON on stdout
	@$(BIN)/python scripts/bench_vision.py

bench-kimi: $(READY)  ## the Kimi family: planning Kimi K3, bytes of its state, ops at its shapes, as JSON on stdout
	@$(BIN)/python scripts/bench_kimi.py

clean:  ## remove what was built; .venv stays
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The lock names torch without a build. A CPU build from the configured index comes first; where that index has
# none (the public one serves CUDA builds for Linux), PyTorch's own index of CPU builds is asked as well.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: dflash needs Python 3.11 or newer: got $$($(PYTHON) --version 2>&1)"; \
	  echo " hint: name one, as in: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) '$(TORCH)+cpu' 2>/dev/null || $(PIP) --extra-index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	$(PIP) --requirement requirements.lock
	$(PIP) --no-build-isolation --editable .
	touch $(READY)

$(DEMO)/target: | $(READY)
	$(BIN)/python scripts/fetch_demo_target.py --out $@

$(DEMO)/key.pem: | $(READY)
	mkdir -p $(DEMO)
	$(BIN)/dflash-run keygen $(DEMO)

# A new key makes the old core worthless to its trust file: export again.
$(DEMO)/core: $(DEMO)/key.pem | $(DEMO)/target
	rm -rf $@
	$(BIN)/dflash-export $(DEMO)/target --draft examples/smollm2-135m-dflash2 --out $@ --key $(DEMO)/key.pem \
	  --name smollm2-135m.dflash2 \
	  --draft-body-quantization mxfp8 --draft-head-quantization nvfp4
