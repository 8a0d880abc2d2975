#!/usr/bin/env bash
# Makes sure that Debian packages are there. Groups: build (to compile), test (what the tests start), bench (rivals).
# As root it installs what is missing; otherwise it names it and fails.
set -euo pipefail

declare -A need=()
for group in "$@"; do
  case "$group" in
    build) need[cc]=gcc; need[g++]=g++; need[protoc]=protobuf-compiler; need[/usr/include/google/protobuf/descriptor.proto]=libprotobuf-dev ;;
    test) need[etcd]=etcd-server; need[npm]=npm; need[python3]=python3; need[curl]=curl; need[systemd-analyze]=systemd
      need[chromium-headless-shell]=chromium-headless-shell
      need[dpkg-shlibdeps]=dpkg-dev; need[fakeroot]=fakeroot; need[man]=man-db; need[lintian]=lintian; need[shellcheck]=shellcheck ;;
    bench) need[nginx]=nginx-light; need[haproxy]=haproxy ;;
    *) echo "unknown group: $group" >&2; exit 2 ;;
  esac
done

missing=()
# Debian's python3 comes without what `python3 -m venv` needs.
case " $* " in
  *" test "*) python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv) ;;
esac
for probe in "${!need[@]}"; do
  case "$probe" in
    /*) [ -e "$probe" ] || missing+=("${need[$probe]}") ;;
    *) PATH="$PATH:/usr/sbin:/sbin" command -v "$probe" >/dev/null || missing+=("${need[$probe]}") ;;
  esac
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "missing packages (Debian names): ${missing[*]}" >&2
  echo "install them, for example: sudo apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi

# Installed servers must not start by themselves: the tests start their own on free ports.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends "${missing[@]}"
