#!/usr/bin/env bash
# Makes a Debian package of a built router: package.sh BINARY DIRECTORY prints the path of the package in DIRECTORY.
# Needs dpkg-dev, binutils and gzip. The same input gives the same package where SOURCE_DATE_EPOCH is set. MAINTAINER
# ("Name <address>") and REVISION (1) are its maintainer and the Debian part of its version.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: ${0##*/} BINARY DIRECTORY" >&2; exit 2; }
binary=$(realpath "$1")
output=$(realpath "$2")
tuning=$(cd "$(dirname "$0")" && pwd)
top=$(dirname "$tuning")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022
root=$work/root
doc=/usr/share/doc/infera-router

architecture=$(dpkg --print-architecture)
version=$("$binary" --version | cut -d' ' -f2)-${REVISION:-1}
maintainer=${MAINTAINER:-infera-router developers <infera-router@infera-router.invalid>}

put() { install -D -m "$1" "$2" "$root$3"; }
page() { mkdir -p "$root${1%/*}" && cat >"$root$1"; }

put 755 "$binary" /usr/bin/infera-router
strip --strip-unneeded --remove-section=.comment "$root/usr/bin/infera-router"

put 644 "$tuning/infera-router.service" /usr/lib/systemd/system/infera-router.service
put 644 "$tuning/infera-router@.service" /usr/lib/systemd/system/infera-router@.service
put 644 "$tuning/90-infera-router.conf" /usr/lib/sysctl.d/90-infera-router.conf
put 644 "$tuning/package/sysusers.conf" /usr/lib/sysusers.d/infera-router.conf
put 644 "$tuning/router.toml" /etc/infera-router/router.toml
put 644 "$tuning/infera-router.env" /etc/infera-router/infera-router.env
put 644 "$tuning/package/logrotate" /etc/logrotate.d/infera-router
for script in check irq governor lib; do
    put 755 "$tuning/$script.sh" "/usr/share/infera-router/$script.sh"
done
chmod 644 "$root/usr/share/infera-router/lib.sh"

"$binary" man | gzip -9n | page /usr/share/man/man8/infera-router.8.gz
"$binary" completions bash | page /usr/share/bash-completion/completions/infera-router
"$binary" completions zsh | page /usr/share/zsh/vendor-completions/_infera-router
"$binary" completions fish | page /usr/share/fish/vendor_completions.d/infera-router.fish
"$binary" config-reference | page $doc/REFERENCE.md
gzip -9n <"$top/CHANGELOG.md" | page $doc/changelog.gz
gzip -9n <<CHANGES | page $doc/changelog.Debian.gz
infera-router ($version) unstable; urgency=medium

  * What has changed in the program is in changelog.gz.

 -- $maintainer  $(date -Ru -d "@${SOURCE_DATE_EPOCH:-$(date +%s)}")
CHANGES
put 644 "$tuning/package/copyright" $doc/copyright
put 644 "$tuning/package/lintian-overrides" /usr/share/lintian/overrides/infera-router
put 644 "$top/README.md" $doc/README.md
put 644 "$tuning/README.md" $doc/TUNING.md
put 644 "$tuning/RUNBOOK.md" $doc/RUNBOOK.md

# Which packages have the shared libraries, and since which version.
mkdir -p "$work/debian" "$root/DEBIAN"
printf 'Source: infera-router\n\nPackage: infera-router\nArchitecture: any\n' >"$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O -e"$root/usr/bin/infera-router" | sed -n 's/^shlibs:Depends=//p')
cat >"$root/DEBIAN/control" <<CONTROL
Package: infera-router
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Depends: $depends
Recommends: systemd
Section: net
Priority: optional
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f1)
Description: KV-cache-aware router for LLM inference fleets
 Stands in front of SGLang, vLLM and ATOM engines, mirrors each worker's KV
 cache from its event stream, and sends every request to the worker that
 already holds the longest prefix of its prompt.
CONTROL
(cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$root/DEBIAN/conffiles"
(cd "$root" && find usr -type f | sort | xargs md5sum) >"$root/DEBIAN/md5sums"
for script in postinst prerm postrm; do
    install -m 755 "$tuning/package/$script" "$root/DEBIAN/$script"
done

package=$output/infera-router_${version}_${architecture}.deb
dpkg-deb --root-owner-group --build "$root" "$package" >&2
echo "$package"
