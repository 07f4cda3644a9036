SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Every Go module of the repository, the root first.
MODULES  := . $(patsubst %/go.mod,%,$(wildcard */go.mod))
BIN      := $(CURDIR)/.build/bin
LINT     := $(BIN)/golangci-lint
SERVICES := $(BIN)/devservices
SQLC     := go tool -modfile=tools/go.mod sqlc
ALL      := postgres,redis,rabbitmq,pgbouncer
EXAMPLES := $(notdir $(patsubst %/main.go,%,$(wildcard examples/*/main.go)))
POSTGRES_VERSIONS ?= 14 15 16 17 18

export GOLANGCI_LINT_CACHE := $(CURDIR)/.build/lint-cache

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(SERVICES) ## run the quickstart: ORDERS=1000 (default), BROKER=rabbitmq (default) or memory
	@go build -o $(BIN)/quickstart ./examples/quickstart
	@$(SERVICES) run --with $(if $(filter memory,$(BROKER)),postgres,postgres,rabbitmq) -- sh -c \
	  'DATABASE_URL="$$COMMITBOX_TEST_POSTGRES" AMQP_URL="$${COMMITBOX_TEST_RABBITMQ-}" exec $(BIN)/quickstart'

.PHONY: example
example: $(SERVICES) ## run an example: NAME=idempotent-http, or another folder of examples/
	@[ -f "examples/$(NAME)/main.go" ] || { echo "NAME must be one of: $(EXAMPLES)"; exit 2; }
	@go build -o $(BIN)/example-$(NAME) ./examples/$(NAME)
	@$(SERVICES) run --with postgres,rabbitmq -- sh -c \
	  'DATABASE_URL="$$COMMITBOX_TEST_POSTGRES" AMQP_URL="$$COMMITBOX_TEST_RABBITMQ" exec $(BIN)/example-$(NAME)'

.PHONY: test
test: $(SERVICES) compiler ## run every test of every module with the race detector
	@$(SERVICES) run --with $(ALL) -- tools/test.sh -race -timeout 15m -- $(MODULES)

.PHONY: test-versions
test-versions: $(SERVICES) ## run the root module's tests on PostgreSQL 14 to 18; POSTGRES_VERSIONS="14 18" selects
	@trap 'exit 130' INT; failed=; for version in $(POSTGRES_VERSIONS); do \
	  echo "== PostgreSQL $$version"; \
	  $(SERVICES) run --postgres=$$version --with $(ALL) -- tools/test.sh -timeout 15m -- . || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed on PostgreSQL$$failed"; exit 1; fi

.PHONY: soak
soak: $(SERVICES) compiler ## run the long forms of the tests
	@COMMITBOX_SOAK=1 $(SERVICES) run --with $(ALL) -- tools/test.sh -race -timeout 120m -- $(MODULES)

.PHONY: bench
bench: $(SERVICES) ## run the benchmarks
	@$(SERVICES) run --with $(ALL) -- tools/test.sh -run '^$$' -bench . -timeout 60m -- $(MODULES)

.PHONY: lint
lint: $(LINT) ## run the linters on every module
	@failed=; for module in $(MODULES); do \
	  (cd $$module && $(LINT) run --config $(CURDIR)/.golangci.yml ./...) || failed=1; \
	done; [ -z "$$failed" ]

.PHONY: format
format: $(LINT) ## format every module with gofumpt
	@for module in $(MODULES); do (cd $$module && $(LINT) fmt --config $(CURDIR)/.golangci.yml); done

.PHONY: generate
generate: ## write internal/db from queries/ and migrations/
	@$(SQLC) generate

.PHONY: verify
verify: $(LINT) ## fail if generated code, go.mod files or formatting differ, or a rule of the repository is broken
	@$(SQLC) diff
	@for module in $(MODULES) tools/lint; do (cd $$module && go mod tidy -diff); done
	@for module in $(MODULES); do (cd $$module && $(LINT) fmt --diff --config $(CURDIR)/.golangci.yml); done
	@go test ./internal/repocheck

.PHONY: services-up
services-up: $(SERVICES) ## start PostgreSQL, Redis, RabbitMQ and PgBouncer in the background and print their addresses
	@$(SERVICES) up --with $(ALL)

.PHONY: services-down
services-down: $(SERVICES) ## stop what services-up started
	@$(SERVICES) down

.PHONY: clean
clean: ## stop the services and remove the build folder
	@if [ -x $(SERVICES) ]; then $(SERVICES) down; fi
	@rm -rf .build

# The race detector needs a C compiler.
.PHONY: compiler
compiler:
	@command -v gcc >/dev/null || tools/install.sh gcc libc6-dev

.PHONY: $(SERVICES)
$(SERVICES):
	@go build -C tools -o $@ ./devservices

$(LINT): tools/lint/go.sum
	@echo "building golangci-lint, about a minute on two cores"
	@go build -C tools/lint -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $@
