# shellcheck shell=bash
# Shared by the scripts beside it: their settings, and how they end. Sourced, not run.

model=${1:-}
[ -n "$model" ] || { sed -n '2,/^$/s/^# *//p' "$0" >&2; exit 2; }
shift

# Address and port by which the router reaches this engine.
HOST=${HOST:-$(hostname -f)}
PORT=${PORT:-8000}
# Data-parallel ranks; rank r publishes on the port + r, so the two ranges must not meet.
RANKS=${RANKS:-1}
EVENTS_PORT=${EVENTS_PORT:-5557}
REPLAY_PORT=${REPLAY_PORT:-5657}
if [ $((EVENTS_PORT < REPLAY_PORT ? REPLAY_PORT - EVENTS_PORT : EVENTS_PORT - REPLAY_PORT)) -lt "$RANKS" ]; then
    echo "EVENTS_PORT and REPLAY_PORT are less than $RANKS apart" >&2
    exit 2
fi

# start WORKER COMMAND...: says what to tell the router, then becomes the engine. PRINT=1 prints the command instead.
start() {
    local worker=$1
    shift
    if [ "${PRINT:-0}" = 1 ]; then
        printf '%q ' "$@"
        printf '\n'
    fi
    printf -- '--worker %s\n' "$worker"
    [ "${PRINT:-0}" = 1 ] || exec "$@"
}
