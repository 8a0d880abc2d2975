#!/usr/bin/env bash
# Walks the Debian package through a systemd of its own, in a container over a throw-away copy of this host's files: install,
# start, reload, watchdog, log rotation, a second instance, upgrade, stop, removal, purge. Takes about a minute.
#
#   tests/systemd.sh PACKAGE
#
# Needs root, systemd-container, dbus, logrotate, curl and overlayfs. Exit status: 0 all well, 1 something is not, 2 usage.
set -euo pipefail

# Inside of the container: one line per step, "ok" or "BAD".
inside() {
    local main port=18000 settings=/etc/infera-router/router.toml log=/var/log/infera-router/access.log
    check() { # what, command...
        local what=$1
        shift
        if "$@" >/tmp/said 2>&1; then printf 'ok   %s\n' "$what"; else printf 'BAD  %s\n' "$what"; cat /tmp/said; fi
    }
    shows() { # unit property=value...
        local unit=$1 property
        shift
        for property in "$@"; do systemctl show "$unit" -p "${property%%=*}" | grep -xF "$property"; done
    }
    answers() { curl -sf --retry 20 --retry-connrefused --retry-delay 1 "http://127.0.0.1:$1/health"; }
    weight() { curl -sf "http://127.0.0.1:$port/v1/admin/config" | grep -F "\"kv-overlap-weight\",\"values\":[\"$1\"]"; }
    fails() { ! "$@"; }
    soon() { for _ in $(seq 240); do "$@" && return; sleep 0.25; done; return 1; }

    check "installs" dpkg -i "$1"
    check "is not enabled by itself" fails systemctl is-enabled infera-router
    echo '[]' >/etc/infera-router/workers.json
    printf '%s\n' "port = $port" 'workers-file = "/etc/infera-router/workers.json"' 'access-log = "json"' \
        "access-log-file = \"$log\"" >"$settings"
    check "starts, and is up when systemctl returns" systemctl start infera-router
    check "serves" answers "$port"
    check "says how it stands" sh -c "systemctl show infera-router -p StatusText | grep 'listening on'"
    check "is watched, as a user of its own" shows infera-router Type=notify WatchdogUSec=30s User=infera-router ActiveState=active
    check "runs on io_uring" sh -c "curl -sf http://127.0.0.1:$port/metrics | grep 'io_driver{driver=\"io_uring\"'"
    echo 'kv-overlap-weight = 3' >>"$settings"
    check "reloads" systemctl reload infera-router
    # systemctl returns once the signal is sent.
    check "has the new weight" soon weight 3
    cp "$settings" /tmp/good
    echo 'nonsense = 1' >>"$settings"
    check "a reload with a mistake fails" fails systemctl reload infera-router
    check "names the mistake in the journal" sh -c "journalctl -u infera-router -o cat | grep 'router.toml:6: unknown key'"
    check "keeps its settings" weight 3
    cp /tmp/good "$settings"
    check "its log is rotated" logrotate -f /etc/logrotate.d/infera-router
    both_written() { answers "$port" && grep -q health "$log" && grep -q health "$log.1"; }
    check "the new file is written" soon both_written
    echo "OPTIONS=--port $((port + 1)) --workers-file /etc/infera-router/workers.json" >/etc/infera-router/b.env
    check "a second instance starts" systemctl start infera-router@b
    check "serves" answers $((port + 1))
    main=$(systemctl show infera-router -p MainPID --value)
    kill -STOP "$main"
    check "one that hangs is restarted" soon shows infera-router NRestarts=1
    check "serves" answers "$port"
    check "upgrades" dpkg -i "$1"
    check "routers run on" systemctl is-active infera-router infera-router@b
    check "stops" systemctl stop infera-router
    check "has ended well" shows infera-router Result=success ExecMainStatus=0
    check "is enabled" systemctl enable --now infera-router
    rm /etc/infera-router/b.env /etc/infera-router/workers.json
    check "is removed" dpkg -r infera-router
    check "runs no more" fails systemctl is-active infera-router infera-router@b
    check "is purged" dpkg -P infera-router
    check "leaves nothing" fails sh -c "find /etc /usr /var /run -xdev -name '*infera-router*' | grep ."
    echo all
}

# Outside: the container's files, in a namespace of mounts that goes with this process.
container() {
    local place=/mnt root=/mnt/root
    mount --make-rprivate /
    mount -t tmpfs tmpfs $place
    mkdir $place/upper $place/work $root
    mount -t overlay overlay -o lowerdir=/,upperdir=$place/upper,workdir=$place/work $root
    mkdir -p $root/etc/systemd/system
    cp "$1" $root/root/infera-router.deb
    cp "$0" $root/root/walk.sh
    # A host's own services have no business in there.
    for unit in systemd-networkd systemd-resolved systemd-timesyncd systemd-logind getty@tty1 console-getty; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit.service"
    done
    cat >$root/etc/systemd/system/walk.service <<UNIT
[Unit]
Requires=basic.target dbus.socket
After=basic.target dbus.socket
[Service]
Type=oneshot
Environment=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
ExecStart=/bin/bash /root/walk.sh --inside /root/infera-router.deb
StandardOutput=append:/root/report
StandardError=append:/root/report
ExecStopPost=/bin/systemctl --no-block poweroff
UNIT
    # Rings are in none of the container's own groups of system calls.
    timeout 240 systemd-nspawn --quiet --directory=$root --machine="infera-walk-$$" --register=no --keep-unit --boot \
        --private-network --system-call-filter="io_uring_setup io_uring_enter io_uring_register" \
        -- --unit=walk.service >$root/root/console 2>&1 || tail -20 $root/root/console
    cat $root/root/report
    grep -qx all $root/root/report && ! grep -q '^BAD' $root/root/report
}

case ${1:-} in
--inside) inside "$2" ;;
--container) container "$2" ;;
"" | -*) sed -n '2,7s/^# \?//p' "$0" >&2; exit 2 ;;
*) exec unshare --mount bash "$0" --container "$(realpath "$1")" ;;
esac
