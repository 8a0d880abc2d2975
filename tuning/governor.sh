#!/usr/bin/env bash
# Keeps cores at speed: a shard that waits for events is idle most of the time, and a core that has to speed up first
# answers tens of microseconds late.
#   governor.sh show        what is
#   governor.sh apply       governor "performance" everywhere, idle states that take more than 10 us to leave off
#   governor.sh undo        what it was before
# DRY_RUN=1 only prints.
set -euo pipefail
STATE=${INFERA_TUNING_STATE:-/run/infera-router/governor.state}
. "$(dirname "$0")/lib.sh"
shopt -s nullglob

LATENCY_MAX_US=10
CPUS=/sys/devices/system/cpu

case ${1:-} in
show)
    found=0
    for file in "$CPUS"/cpu[0-9]*/cpufreq/scaling_governor; do say "$file = $(cat "$file")"; found=1; done
    [ $found = 1 ] || say "no frequency control here (a virtual machine leaves it to its host)"
    for state in "$CPUS"/cpu0/cpuidle/state[0-9]*; do
        say "idle state $(cat "$state/name"): $(cat "$state/latency") us to leave, disabled = $(cat "$state/disable")"
    done
    ;;
apply)
    found=0
    for file in "$CPUS"/cpu[0-9]*/cpufreq/scaling_governor; do change "$file" performance; found=1; done
    [ $found = 1 ] || say "no frequency control here (a virtual machine leaves it to its host)"
    for state in "$CPUS"/cpu[0-9]*/cpuidle/state[0-9]*; do
        [ "$(cat "$state/latency")" -le $LATENCY_MAX_US ] || change "$state/disable" 1
    done
    ;;
undo) undo ;;
*) sed -n '4,6s/^# *//p' "$0" >&2; exit 2 ;;
esac
