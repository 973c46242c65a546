#!/bin/sh
# The tests kill and restart a real etcd. It is found in EPLANE_ETCD (a path) or on the PATH; else, as root on
# Debian, its package is installed.
set -eu
if [ -n "${EPLANE_ETCD:-}" ] && [ -x "$EPLANE_ETCD" ]; then exit 0; fi
if command -v etcd >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing etcd-server"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends etcd-server >/dev/null
    exit 0
fi
echo "no etcd found: install etcd 3.4.23 or newer (not 3.5.0 to 3.5.2), or set EPLANE_ETCD to its path" >&2
exit 5
