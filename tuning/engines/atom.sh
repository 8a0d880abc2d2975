#!/usr/bin/env bash
# Starts ATOM so that the router can mirror its cache, and says which --worker belongs to it.
#   tuning/engines/atom.sh MODEL [options of ATOM's own]
# Variables: HOST, PORT, RANKS, EVENTS_PORT, REPLAY_PORT (lib.sh has their defaults), BLOCK tokens per block, PRINT=1 to print only.

set -euo pipefail
. "$(dirname "$0")/lib.sh"

block=${BLOCK:-16}
command=(env ATOM_KV_EVENTS_ENABLE=1 "ATOM_KV_EVENTS_ENDPOINT=tcp://*:$EVENTS_PORT"
    "ATOM_KV_EVENTS_REPLAY_ENDPOINT=tcp://*:$REPLAY_PORT"
    python3 -m atom.entrypoints.openai_server --model "$model" --server-port "$PORT" --block-size "$block"
    --enable_prefix_caching)
dp_size=
if [ "$RANKS" != 1 ]; then
    command+=(--data-parallel-size "$RANKS" --enable-dp-attention)
    dp_size=,dp-size=$RANKS
fi

# It answers for its model alone: the rest is said.
worker=http://$HOST:$PORT,engine=atom,block-size=$block$dp_size
start "$worker,kv-events=tcp://$HOST:$EVENTS_PORT,kv-replay=tcp://$HOST:$REPLAY_PORT" "${command[@]}" "$@"
