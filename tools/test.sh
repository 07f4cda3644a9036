#!/bin/bash
# Runs go test in each module and repeats the result of every package at the end, failures last.
# usage: tools/test.sh [go test flags] -- module...
set -u
flags=()
while [ "${1:?usage: tools/test.sh [flags] -- module...}" != "--" ]; do
  flags+=("$1")
  shift
done
shift

mkdir -p .build
log=$PWD/.build/test.log
: >"$log"
failed=0
for module in "$@"; do
  set -o pipefail
  (cd "$module" && go test "${flags[@]}" ./... 2>&1) | tee -a "$log" || failed=1
done

echo
echo "== Results"
grep -E '^ok  ' "$log"
grep -E '^(--- FAIL|FAIL|panic:|WARNING: DATA RACE)' "$log"
exit "$failed"
