#!/usr/bin/env bash
# Starts vLLM so that the router can mirror its cache, and says which --worker belongs to it.
#   tuning/engines/vllm.sh MODEL [options of vLLM's own]
# Variables: HOST, PORT, RANKS, EVENTS_PORT, REPLAY_PORT (lib.sh has their defaults), PRINT=1 to print only.

set -euo pipefail
. "$(dirname "$0")/lib.sh"

events=$(printf '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d","topic":"kv-events"}' \
    "$EVENTS_PORT" "$REPLAY_PORT")
command=(vllm serve "$model" --host 0.0.0.0 --port "$PORT" --kv-events-config "$events" --enable-prompt-tokens-details)
[ "$RANKS" = 1 ] || command+=(--data-parallel-size "$RANKS")

# All else is asked of the engine.
start "http://$HOST:$PORT" "${command[@]}" "$@"
