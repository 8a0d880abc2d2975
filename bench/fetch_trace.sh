#!/usr/bin/env bash
# Fetches the Mooncake conversation trace (Apache-2.0; 12,031 requests of one hour) for `simulate`, `quality` and
# `loadgen run --trace`, pinned by commit and checksum.
#
#   bench/fetch_trace.sh [FILE]      default: target/traces/conversation_trace.jsonl
#
# TRACE_URL names another place to take it from (a mirror, file:///...); the checksum stays.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
file=${1:-$root/target/traces/conversation_trace.jsonl}
sum=b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df
commit=a2a4b18ac537fd798d50e6e9f57031ce86419a37
url=${TRACE_URL:-https://raw.githubusercontent.com/kvcache-ai/Mooncake/$commit/FAST25-release/traces/conversation_trace.jsonl}

is_whole() { [ -f "$1" ] && echo "$sum  $1" | sha256sum --check --status; }

# curl by itself asks again after a timeout or a 5xx, but not for a transfer that was cut (18, 56).
download() {
    local code attempt
    for attempt in 1 2 3; do
        code=0
        curl --fail --silent --show-error --location --retry 2 --connect-timeout 20 \
            --speed-limit 1000 --speed-time 30 --output "$part" "$url" || code=$?
        case $code in
            18 | 56) echo "attempt $attempt of 3 was cut" >&2 ;;
            *) return "$code" ;;
        esac
    done
    return "$code"
}

is_whole "$file" && exit 0
mkdir -p "$(dirname "$file")"
part=$file.part
trap 'rm -f "$part"' EXIT
if ! download; then
    echo "$url cannot be fetched; TRACE_URL may name a mirror" >&2
    exit 1
fi
# A wrong file never takes the place that the tools read.
if ! is_whole "$part"; then
    echo "$url is not the trace that the figures were made with" >&2
    exit 1
fi
mv "$part" "$file"
