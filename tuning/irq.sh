#!/usr/bin/env bash
# Puts a network card's interrupts on cores of their own, so that they do not interrupt a shard in mid-relay.
#   irq.sh show IFACE            what is
#   irq.sh apply IFACE CPULIST   interrupts of IFACE round-robin over CPULIST (as in 0-1,8), RPS off on the others
#   irq.sh undo                  what it was before
# DRY_RUN=1 only prints. Stop irqbalance first, or it moves them back.
set -euo pipefail
STATE=${INFERA_TUNING_STATE:-/run/infera-router/irq.state}
. "$(dirname "$0")/lib.sh"

usage() { sed -n '3,5s/^# *//p' "$0" >&2; exit 2; }

cpus_of() { # 0-1,8 -> 0 1 8
    local part
    for part in ${1//,/ }; do
        [[ $part =~ ^[0-9]+(-[0-9]+)?$ ]] || die "'$1' is not a list of CPUs (as in 0-1,8)"
        seq "${part%-*}" "${part#*-}"
    done
}

# Interrupt numbers of a card: the MSI vectors of its PCI device, or the lines that carry its name (virtio).
irqs_of() {
    local device=/sys/class/net/$1/device
    [ -d "/sys/class/net/$1" ] || die "no interface $1; there are: $(cd /sys/class/net && echo *)"
    if [ -d "$device/msi_irqs" ]; then
        (cd "$device/msi_irqs" && printf '%s\n' *) | sort -n
    else
        local name=$1
        [ -e "$device" ] && name="$1|$(basename "$(readlink -f "$device")")"
        grep -E "($name)" /proc/interrupts | cut -d: -f1 | tr -d ' ' || true
    fi
}

case ${1:-} in
show)
    [ $# = 2 ] || usage
    irqs=$(irqs_of "$2")
    for irq in $irqs; do
        say "irq $irq -> cpu $(cat "/proc/irq/$irq/smp_affinity_list" 2>/dev/null || echo unknown)"
    done
    for queue in /sys/class/net/"$2"/queues/rx-*; do say "${queue##*/} rps_cpus = $(cat "$queue/rps_cpus")"; done
    ;;
apply)
    [ $# = 3 ] || usage
    mapfile -t cpus < <(cpus_of "$3")
    [ ${#cpus[@]} -gt 0 ] || usage
    irqs=$(irqs_of "$2")
    at=0
    for irq in $irqs; do
        change "/proc/irq/$irq/smp_affinity_list" "${cpus[at % ${#cpus[@]}]}"
        at=$((at + 1))
    done
    [ "$at" -gt 0 ] || say "no interrupts of $2 found; nothing to spread"
    # With a queue per core, steering in software only adds a hop.
    for queue in /sys/class/net/"$2"/queues/rx-*; do change "$queue/rps_cpus" 0; done
    ;;
undo) undo ;;
*) usage ;;
esac
