# Everything runs in .venv, which the first target that needs it makes. PYTHON may name the interpreter to make it with,
# PY one that has the packages already (another tree's .venv), for the targets that build the native kernels.
PYTHON ?= python3
BIN := .venv/bin
PY ?= $(BIN)/python
# Programs of the machine are used where it has them.
BUILD_TOOLS := scikit-build-core nanobind $(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))

.PHONY: demo test test-all test-long test-reference triton-check gpu-rehearsal speed-check aarch64-check aarch64-quick soak ranks docs-check lint style types docstrings site proofs \
  package-check wheels wheel-test release-check format kernels native native-sanitize clean

# With PY of another tree, its packages are there.
BUILD_PACKAGES := $(if $(filter $(BIN)/python,$(PY)),.venv/.installed-build)

# Packages are downloaded while kernels are compiled.
BOTH := $(MAKE) --no-print-directory --jobs=2

demo:
	@$(BOTH) .venv/.installed kernels
	$(BIN)/ostinato generate \
	  "Ava has 17 apples and buys 25 more. She gives away 9. How many apples are left?" \
	  "Tom collects 125 stamps. He loses 17 of them and then gets 48 more. How many stamps does he have now?" \
	  "A box holds 6 pencils. Mia buys 8 boxes and gives 12 pencils to Leo. How many pencils does Mia have left?"

# A worker for each processor runs a stretch of files, so that it makes once what tests of a file share; at the end it takes
# from another.
PYTEST := $(BIN)/python -m pytest -n logical --dist worksteal

# One case of each test that is not slow: what a person waits for. tests/conftest.py chooses it.
test:
	@$(BOTH) .venv/.installed-test native
	$(PYTEST) --cases one

# All cases; of CASES=2/4 one case of each test and the second quarter of the others, of CASES=others what `test` leaves out.
CASES ?= all
test-all: .venv/.installed-test native
	$(PYTEST) --cases $(CASES)

# What `make test-all` leaves out: recipes where it is not their turn (tests/support/turns.py), and what takes minutes.
test-long: .venv/.installed-test native
	$(PYTEST) -m long --ignore=tests/packaging

# Without native kernels, as where there is no compiler: what plans, captures, runs and proves the kernels of an engine
# that chooses them itself, and what the command line says of them. All else chooses its kernels, plans for a machine that
# it makes up, or is of what surrounds an engine, and is the same with either.
WITH_REFERENCES := parity/test_parity.py parity/test_parity_graphs.py parity/test_parity_speculation.py \
  parity/test_parity_prefix.py::test_a_prompt_gives_the_same_tokens_whatever_part_of_it_hits \
  parity/test_poison.py parity/test_poison_speculation.py \
  graphs/test_graph_tape.py graphs/test_graphs.py graphs/test_encoder_graphs_engine.py \
  engine/test_embed.py engine/test_engine.py engine/test_engine_sampling.py engine/test_given_texts.py \
  models/test_gguf.py models/test_int4.py models/test_kimi_linear.py models/test_quantization.py \
  models/test_vision_heads.py models/test_vision_parity.py models/test_vision_poison.py models/test_vision_settings.py \
  plan/test_activation_memory.py plan/test_plan_kernels.py plan/test_planned_tapes.py plan/test_prediction.py \
  sampling/test_guided_outputs.py spec_decode/test_speculation_outputs.py \
  spec_decode/test_speculation_state.py demo/test_demo_checkpoint.py demo/test_demo_vl_engine.py \
  verify/test_verify.py cli/test_cli.py cli/test_cli_plan.py test_docs_commands.py
test-reference: .venv/.installed-test
	$(PYTEST) --cases $(CASES) --reference-kernels $(WITH_REFERENCES:%=tests/%)

# Every Triton launch of the benchmark shapes' steps, compiled for four generations of GPUs: no GPU is needed. A minute
# per hundred launches; what was compiled before is kept (TRITON_CACHE_DIR). KERNEL names one.
triton-check: .venv/.installed-test
	PYTHONPATH=src $(PY) tools/check_triton.py $(if $(KERNEL),--kernel $(KERNEL)) benchmarks/models/*

# Step times over their floors, beside the stored record of this kind of processor, on a quiet machine: five minutes.
speed-check: .venv/.installed-test native
	PYTHONPATH=src $(PY) benchmarks/speed_check.py

# The modules of aarch64 under an emulator: the tests of kernels, a recipe for each kind of layer, the demo, and other
# processors. Sets itself up in build/aarch64 (2 GB). Tens of minutes; ARGS="--only parity" runs some parts. For CI what
# fits in five minutes once it is set up and compiled. Skips, and says why, without Debian's packages.
aarch64-check: $(BUILD_PACKAGES)
	$(PY) tools/aarch64_check.py $(ARGS)

aarch64-quick: $(BUILD_PACKAGES)
	$(PY) tools/aarch64_check.py --quick $(ARGS)

# `ostinato gpu-check` on a pretended GPU, in tiny shapes, and with a fault planted in every part: minutes. Then the size of
# the tree, and the command for a machine with a GPU. PARTS names some parts; SET_UP=1 times an environment from nothing; WHEELS is a
# folder for what a machine without a network lacks.
gpu-rehearsal: .venv/.installed-test native
	PYTHONPATH=src:. $(BIN)/python tools/gpu_rehearsal.py $(if $(PARTS),--parts $(PARTS)) $(if $(SET_UP),--set-up) \
	  $(if $(WHEELS),--wheels $(WHEELS))

# What the tests of the server do in seconds, for minutes: 10,000 requests, and more of them made up from its schema; and
# frameworks and judges that are its clients. Guides made up at random, by the ten thousand. `JUDGES=llm` installs and
# runs that one alone: guidellm needs torch, and each of the others a gigabyte.
JUDGES ?= llm lm_eval aiperf guidellm
AS_VARIABLES = $(foreach judge,$(JUDGES),$(shell echo $(judge) | tr a-z A-Z)=$(CURDIR)/build/$(judge)/bin/$(judge))

soak: .venv/.installed-test build/clients/.installed $(JUDGES:%=build/%/.installed) native
	SOAK_REQUESTS=10000 $(BIN)/python -m pytest -s tests/serve/test_serve_soak.py
	$(BIN)/python -m pytest --hypothesis-profile=soak tests/serve/test_serve_connection_attacks.py
	GUIDE_EXAMPLES=50000 $(BIN)/python -m pytest tests/sampling/test_guide_fuzz.py
	SCHEMA_EXAMPLES=300 $(BIN)/python -m pytest tests/serve/test_serve_schema.py
	$(AS_VARIABLES) $(BIN)/python -m pytest tests/serve/test_serve_evaluators.py
	$(BIN)/python -m pytest -m attacks tests/serve/attacks
	CLIENTS=$(CURDIR)/build/clients/bin/python $(BIN)/python -m pytest tests/serve/test_serve_clients.py

# Every recipe with every number of processes that can share it; `make test` has two of them.
ranks: .venv/.installed-test native
	$(BIN)/python -m pytest -m ranks

# Every command that the pages show, also those that take some seconds. `make test` runs the others.
docs-check: .venv/.installed-test native
	DOCS_CHECK=1 $(BIN)/python -m pytest tests/test_docs_commands.py

# One case of each test that proves a promise, in minutes; writes docs/proofs.md.
proofs: .venv/.installed-test native
	PYTHONPATH=src $(BIN)/python tools/proofs.py

lint: style types docstrings site package-check

style: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@! git grep -nE '^(<{7}|>{7}) '  # what a merge left

types: .venv/.installed-test
	$(BIN)/mypy

docstrings: | .venv/bin/python
	$(BIN)/python tools/docstring_rule.py src/ostinato

# The pages as a site, in build/site. A link that leads nowhere, or a page that is not in the navigation, ends it.
site: .venv/.installed-package
	$(BIN)/python tools/site_pages.py build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The workflows and the forms of issues by their schemas, the image by hadolint, and which wheels the recipe would build.
package-check: .venv/.installed-package
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms \
	  $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	test ! -e $(BIN)/hadolint || $(BIN)/hadolint deploy/Dockerfile
	$(BIN)/cibuildwheel --platform linux --print-build-identifiers > build/wheels.txt

# A wheel with every instruction set of this architecture, in dist/: where there are containers, by cibuildwheel, for every
# Python; else for the Python of .venv and systems as new as this one. Compiling takes a quarter of an hour on four cores;
# what is compiled stays in build/wheel.
wheels: $(if $(filter $(BIN)/python,$(PY)),.venv/.installed-package)
	$(if $(shell docker info >/dev/null 2>&1 && echo yes),$(PY) -m cibuildwheel --platform linux --output-dir dist,$(PY) -m build \
	  --wheel --no-isolation --outdir dist --config-setting=build-dir=build/wheel \
	  --config-setting=cmake.define.OSTINATO_ISA=all)

# Minutes: both archives from a clean copy of the tree, and the wheel in an environment of its own, outside the tree.
# WHEEL=dist/NAME.whl tries that wheel, of all instruction sets, in place of one made here.
wheel-test: $(if $(filter $(BIN)/python,$(PY)),.venv/.installed-test .venv/.installed-package)
	WHEEL=$(abspath $(WHEEL)) $(PY) -m pytest -m long tests/packaging

# What the workflow does for a release with the archives in dist/, as far as one machine can: notes, bill of materials and
# checksums beside them. TAG=v1.2.3 checks also what only a release needs.
release-check: $(if $(filter $(BIN)/python,$(PY)),.venv/.installed-package)
	$(PY) -m venv --clear build/release
	build/release/bin/pip install --quiet --constraint constraints.txt --find-links dist --no-index --no-deps ostinato
	build/release/bin/pip install --quiet --constraint constraints.txt --find-links dist ostinato
	$(PY) tools/release.py dist --environment build/release/bin/python $(if $(TAG),--tag $(TAG))
	$(PY) -m twine check --strict $(wildcard dist/*.whl dist/*.tar.gz)
	cd dist && sha256sum --check SHA256SUMS

format: .venv/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The instruction sets to build: the best that this machine runs, and what stands in for others in tests.
ISA ?= native;stand_ins

# Configures and builds in build/$(1), with the interpreter and the tools that $(PY) has. $(2): further options; $(3): the
# target. ninja counts its steps, and chooses their number by itself: without MAKEFLAGS it asks no make for turns.
define build_native
export PATH="$(dir $(abspath $(PY))):$$PATH" && unset MAKEFLAGS && \
cmake -S . -B build/$(1) -G Ninja -D Python_EXECUTABLE="$$($(PY) -c 'import sys; print(sys.executable)')" \
  -D OSTINATO_ISA="$(ISA)" $(2) --log-level=NOTICE --no-warn-unused-cli && \
NINJA_STATUS="[kernels %f/%t, %es] " cmake --build build/$(1) --target $(3)
endef

# Without isolation: the build's tools come from .venv, at the versions of constraints.txt. Without kernels, which are
# compiled once, by `kernels` or `native`. $(1): what to install.
define install_editable
$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation \
  --config-settings build-dir=build/editable --config-settings cmake.define.OSTINATO_ISA=none --editable $(1)
endef

# The kernels for this machine, into src/ostinato; after a change, what changed. `native` has also the stand-ins for other
# machines, which tests need. Both share one build folder with the same settings, so that neither compiles anew.
kernels: $(BUILD_PACKAGES)
	@test -e build/native/.ninja_log || \
	  echo "Compiling the kernels for this machine: about four minutes on two cores, once. attention.cpp takes longest."
	@$(call build_native,native,-D OSTINATO_INPLACE=ON,kernels)

native: $(BUILD_PACKAGES)
	@$(call build_native,native,-D OSTINATO_INPLACE=ON,all)

# The same kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a package of their own that goes before src/.
# Both runtimes and libstdc++ must be there before Python, in each worker: LD_PRELOAD. A finding ends its worker, which
# fails the test; its report goes to stderr, which pytest therefore leaves alone. Leaks are not looked for, since Python
# itself ends without freeing all that it has. The tests that call kernels are run, as engines call no others; but for
# test_ops_facts, which asks for their names alone. A kernel that no test called is a failure, too.
SANITIZED := build/sanitize/package
SANITIZED_TESTS = $(filter-out %/test_ops_facts.py,$(shell grep -l native_sets tests/ops/test_*.py))
PRELOADED = $(foreach lib,libasan.so libubsan.so libstdc++.so,$$($${CXX:-c++} -print-file-name=$(lib)))
ALL_REACHED = $(if $(filter file,$(origin SANITIZED_TESTS)),-p tests.support.reached)

native-sanitize: $(if $(filter $(BIN)/python,$(PY)),.venv/.installed-test)
	$(call build_native,sanitize,-D OSTINATO_SANITIZE=ON -D CMAKE_BUILD_TYPE=Debug,all)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r src/ostinato $(SANITIZED) && rm -f $(SANITIZED)/ostinato/_native_*.so
	cp build/sanitize/_native_*.so $(SANITIZED)/ostinato
	LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=halt_on_error=1:detect_leaks=0 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=2 PYTHONPATH=$(SANITIZED) \
	  $(PY) -m pytest -n logical --dist worksteal --capture=sys -p no:cacheprovider --hypothesis-profile=few \
	  $(ALL_REACHED) $(SANITIZED_TESTS)

clean:
	rm -rf .venv build dist src/*.egg-info src/ostinato/_native_*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	@echo "Making .venv"
	@$(PYTHON) -c 'import sys; sys.exit("Ostinato needs Python 3.11 or newer; set PYTHON" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv

.venv/.installed-build: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing what compiles: $(BUILD_TOOLS)"
	@$(BIN)/pip install --quiet --constraint constraints.txt $(BUILD_TOOLS)
	@touch $@

.venv/.installed: pyproject.toml constraints.txt .venv/.installed-build
	@echo "Installing packages"
	@$(call install_editable,.)
	@touch $@

# torch first, by its exact version, so that no other package chooses one.
.venv/.installed-test: pyproject.toml constraints.txt .venv/.installed
	@echo "Installing the packages of the tests, 1 of 2: torch, the largest"
	@$(BIN)/pip install --quiet $(shell grep '^torch==' constraints.txt)
	@echo "Installing the packages of the tests, 2 of 2"
	@$(call install_editable,'.[test]')
	@touch $@

# Apart, as these packages want other versions of some than constraints.txt has.
build/clients/.installed: tests/serve/clients.txt
	$(PYTHON) -m venv build/clients
	build/clients/bin/pip install --quiet --requirement tests/serve/clients.txt
	touch $@

# Each apart, as they want other versions of openai, and of one another's packages.
build/llm/.installed: PACKAGES := llm==0.36 openai==3.57.0
build/lm_eval/.installed: PACKAGES := lm-eval[api]==0.4.13 transformers==5.24.0
build/aiperf/.installed: PACKAGES := aiperf==0.13.0
build/guidellm/.installed: PACKAGES := guidellm==0.8.1 torch==2.14.1
build/llm/.installed build/lm_eval/.installed build/aiperf/.installed build/guidellm/.installed: build/%/.installed: Makefile
	$(PYTHON) -m venv build/$*
	build/$*/bin/pip install --quiet $(PACKAGES)
	touch $@

# By name: what is installed already has these extras, and is not built again.
.venv/.installed-package: pyproject.toml constraints.txt .venv/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt 'ostinato[docs,package]'
	touch $@
