#!/usr/bin/env bash
# Starts SGLang so that the router can mirror its cache, and says which --worker belongs to it.
#   tuning/engines/sglang.sh MODEL [options of SGLang's own]
# Variables: HOST, PORT, RANKS, EVENTS_PORT, REPLAY_PORT (lib.sh has their defaults), PAGE tokens per block, PRINT=1 to print only.

set -euo pipefail
. "$(dirname "$0")/lib.sh"

events=$(printf '{"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d","topic":"kv-events"}' \
    "$EVENTS_PORT" "$REPLAY_PORT")
# Its own default is pages of one token, which makes 16 times the events and the memory.
command=(python3 -m sglang.launch_server --model-path "$model" --host 0.0.0.0 --port "$PORT"
    --page-size "${PAGE:-16}" --kv-events-config "$events" --enable-cache-report)
[ "$RANKS" = 1 ] || command+=(--tp-size "$RANKS" --dp-size "$RANKS" --enable-dp-attention)

# All else is asked of the engine.
start "http://$HOST:$PORT" "${command[@]}" "$@"
