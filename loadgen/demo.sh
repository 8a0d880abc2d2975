#!/usr/bin/env bash
# The demo on a fresh machine: system packages (installed when run as root, named otherwise), build, run.
# Usage: loadgen/demo.sh [options of `loadgen demo`]
set -euo pipefail
cd "$(dirname "$0")/.."
bash tests/setup/system_packages.sh build
cargo build --release --locked -p infera-router --bin infera-router
exec cargo run --release --locked -p loadgen -- demo "$@"
