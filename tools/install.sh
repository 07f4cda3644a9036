#!/bin/bash
# Installs Debian packages, as root only. usage: tools/install.sh package...
set -eu
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "please install: $*" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "$@" >/dev/null
