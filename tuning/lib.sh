# shellcheck shell=bash
# What the scripts of this folder share: writing a setting down before it is changed, and putting it back.
# Sourced, not run. The caller sets STATE, the file that remembers.

say() { printf '%s\n' "$*"; }

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# change FILE VALUE: prints the change; with DRY_RUN=1 that is all.
change() {
    local file=$1 value=$2 before
    [ -w "$file" ] || { say "skip   $file (not writable)"; return 0; }
    before=$(cat "$file") || return 0
    if [ "$before" = "$value" ]; then
        say "keep   $file = $before"
        return 0
    fi
    say "change $file: $before -> $value"
    [ "${DRY_RUN:-0}" = 1 ] && return 0
    mkdir -p "${STATE%/*}"
    # The oldest value is the one to go back to.
    grep -qsF "$file"$'\t' "$STATE" || printf '%s\t%s\n' "$file" "$before" >>"$STATE"
    printf '%s' "$value" >"$file" || say "failed $file"
}

undo() {
    [ -s "$STATE" ] || { say "nothing to undo ($STATE is empty)"; return 0; }
    local file before
    while IFS=$'\t' read -r file before; do
        say "restore $file = $before"
        [ "${DRY_RUN:-0}" = 1 ] || printf '%s' "$before" >"$file" || say "failed $file"
    done <"$STATE"
    [ "${DRY_RUN:-0}" = 1 ] || rm -f "$STATE"
}
