# Every target but help runs a script in scripts/, for people and CI alike. ARGS goes to it: make test ARGS="tests/unit -k config"
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-all check bench soak docs clean

help: ## this list
	@echo 'layerpush: make TARGET [ARGS="..."]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: ## make the pinned CPU environment in .venv (the other targets do it themselves; PYTHON=... chooses the interpreter)
	@scripts/setup $(ARGS)

demo: ## watch vLLM push KV layer by layer between two engines on this machine, no GPU needed (ARGS="--help" for options)
	@scripts/demo $(ARGS)

test: ## run check, then all tests that are not exhaustive: eleven minutes on two cores (ARGS="tests/unit -k config" chooses)
	@scripts/test $(ARGS)

test-fast: ## only tests that start no engines, for while you work: 3 minutes on two cores
	@scripts/test --fast $(ARGS)

test-all: ## run check, then all tests: an hour on two cores
	@scripts/test --all $(ARGS)

check: ## ruff, mypy --strict, import contracts, and whether names of vLLM have moved
	@scripts/check $(ARGS)

bench: ## measure auto, layer, chunk and push of the whole request beside one engine without a transfer
	@scripts/bench $(ARGS)

soak: ## real engines under load and random faults for MINUTES=10; every answer and every pushed block is checked
	@scripts/soak $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

docs: ## build the documentation into build/site
	@scripts/docs $(ARGS)

clean: ## remove caches and build products, not .venv
	@scripts/clean $(ARGS)
