#!/usr/bin/env bash
# Fetches the Mooncake conversation trace (Apache-2.0; 12,031 requests of one hour) for `simulate` and `quality`, pinned by
# commit and checksum.
#
#   bench/fetch_trace.sh [FILE]      default: target/traces/conversation_trace.jsonl
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
file=${1:-$root/target/traces/conversation_trace.jsonl}
sum=b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df
commit=a2a4b18ac537fd798d50e6e9f57031ce86419a37
url=https://raw.githubusercontent.com/kvcache-ai/Mooncake/$commit/FAST25-release/traces/conversation_trace.jsonl

is_whole() { [ -f "$file" ] && echo "$sum  $file" | sha256sum --check --status; }

is_whole && exit 0
mkdir -p "$(dirname "$file")"
curl --fail --silent --show-error --location --output "$file.part" "$url"
mv "$file.part" "$file"
if ! is_whole; then
    echo "$file is not the trace that the figures were made with" >&2
    exit 1
fi
