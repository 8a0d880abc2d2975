#!/usr/bin/env bash
# A virtual environment with the official clients, pinned, under target/python. Idempotent.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=target/python
wanted="$(cat tests/setup/requirements.txt)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/installed.txt" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
mkdir -p target
rm -rf "$venv"
if ! python3 -m venv "$venv"; then
  echo "python3 -m venv failed (Debian package: python3-venv)" >&2
  exit 1
fi
"$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/setup/requirements.txt
printf '%s' "$wanted" >"$venv/installed.txt"
