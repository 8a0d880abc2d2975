#!/usr/bin/env bash
# Says what on this host is missing for infera-router, and what that costs. Changes nothing.
# Exit code: 0 all is well, 1 something costs speed, 2 something does not work at all.
set -uo pipefail
worst=0

report() { # level text
    case $1 in
    ok) ;;
    slow) [ $worst -ge 1 ] || worst=1 ;;
    bad) worst=2 ;;
    esac
    printf '%-5s %s\n' "$1" "$2"
}

read_or() { cat "$1" 2>/dev/null || printf '%s' "$2"; }

at_least() { # file minimum cost
    local value
    value=$(read_or "$1" missing)
    local name=${1#/proc/sys/}
    name=${name//\//.}
    if [ "$value" = missing ]; then
        report slow "$name does not exist on this kernel: $3"
    elif [ "${value%%[!0-9]*}" -ge "$2" ] 2>/dev/null; then
        report ok "$name = $value"
    else
        report slow "$name = $value, better $2 or more: $3"
    fi
}

release=$(uname -r)
major=${release%%.*}
minor=${release#*.}
minor=${minor%%[!0-9]*}
if [ "$((major * 1000 + minor))" -ge 6001 ]; then
    report ok "kernel $release"
else
    report slow "kernel $release: before 6.1 io_uring wakes shards by interrupts; the router falls back to plain rings or epoll"
fi

case $(read_or /proc/sys/kernel/io_uring_disabled 0) in
0) report ok "io_uring is allowed" ;;
1) report slow "kernel.io_uring_disabled = 1: only for members of kernel.io_uring_group; others run on epoll" ;;
*) report slow "kernel.io_uring_disabled = 2: the router runs on epoll" ;;
esac

hard=$(ulimit -Hn)
if [ "$hard" = unlimited ] || [ "$hard" -ge 65536 ]; then
    report ok "open files, hard limit: $hard"
else
    report slow "open files, hard limit $hard: about $((hard / 2 - 100)) streams at a time (two descriptors each)"
fi

cores=$(nproc)
if [ "$cores" -ge 3 ]; then
    report ok "$cores cores for this shell"
else
    report slow "$cores cores for this shell: the ingest core and the shards share them"
fi

at_least /proc/sys/net/core/somaxconn 4096 "bursts of connections are dropped and come back after a second"
at_least /proc/sys/net/ipv4/tcp_max_syn_backlog 4096 "the same for connections in their handshake"
at_least /proc/sys/net/ipv4/tcp_migrate_req 1 "when one of two routers on a port dies, connections in its queue are reset"
at_least /proc/sys/net/core/rmem_max 4194304 "long prompts over fast links are slowed by small windows"
at_least /proc/sys/net/core/netdev_max_backlog 4096 "packets are dropped in bursts"

slow_start=$(read_or /proc/sys/net/ipv4/tcp_slow_start_after_idle 0)
if [ "$slow_start" = 0 ]; then
    report ok "net.ipv4.tcp_slow_start_after_idle = 0"
else
    report slow "net.ipv4.tcp_slow_start_after_idle = $slow_start: a stream that paused begins slowly again"
fi

governors=$(cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor 2>/dev/null | sort -u | tr '\n' ' ')
case $governors in
"") report ok "no frequency control here (a virtual machine leaves it to its host)" ;;
"performance ") report ok "governor: performance" ;;
*) report slow "governor: ${governors% }: cores that have to speed up first answer late; see governor.sh" ;;
esac

if pgrep -x irqbalance >/dev/null 2>&1; then
    report slow "irqbalance runs: it moves interrupts onto the cores of the shards; see irq.sh"
else
    report ok "irqbalance does not run"
fi

huge=$(read_or /sys/kernel/mm/transparent_hugepage/enabled "[none]")
case $huge in
*"[never]"*) report slow "transparent huge pages are off: the index misses the TLB more often" ;;
*) report ok "transparent huge pages: $huge" ;;
esac

available_kib=$(sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo)
if [ "${available_kib:-0}" -ge 1048576 ]; then
    report ok "memory available: $((available_kib / 1024)) MiB"
else
    report bad "memory available: $((${available_kib:-0} / 1024)) MiB: a tokenizer, caches and an index of a large fleet need 1 GiB"
fi
exit $worst
