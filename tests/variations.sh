#!/usr/bin/env bash
# Run tests on variations of this machine: `tests/variations.sh PYTHON [ARGUMENTS OF PYTEST]`.
# A variation that cannot be made here is skipped, with the reason. NAMES="rounding locale" chooses some.
set -uo pipefail

python=$(command -v "$1") || { echo "$1 is not there"; exit 2; }
shift
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=()

# variation NAME COMMAND...: run the tests below a command that ends with them.
variation() {
    local name=$1
    shift
    [[ " ${NAMES:-$name} " == *" $name "* ]] || return 0
    echo "== $name"
    "$@" "$python" -m pytest -p no:cacheprovider "${tests[@]}" || failed+=("$name")
}

skip() {
    [[ " ${NAMES:-$1} " != *" $1 "* ]] || echo "== $1: skipped, because $2"
}

tests=("$@")
variation rounding env ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
variation ascii env LC_ALL=C TZ=Asia/Kolkata  # not PYTHONUTF8=0: torch._inductor could not read its own files
if locale -a | grep -qi '^tr_TR.utf8$'; then
    variation locale env LC_ALL=tr_TR.UTF-8 TZ=America/St_Johns
else
    skip locale "the locale tr_TR.UTF-8 is missing: localedef -i tr_TR -f UTF-8 tr_TR.UTF-8"
fi
if command -v taskset >/dev/null; then
    variation one-core taskset -c 0
else
    skip one-core "taskset is missing: apt install util-linux"
fi
if memory=$(mktemp -d -p /dev/shm 2>/dev/null); then
    variation tmpfs env TMPDIR="$memory"
    rm -rf "$memory"
else
    skip tmpfs "/dev/shm cannot be written"
fi
if unshare -m true 2>/dev/null; then
    # shellcheck disable=SC2016  # the inner shell expands it
    variation small-shm unshare -m sh -c \
        'mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && exec "$@"' sh
else
    skip small-shm "only root may mount a file system"
fi
if unshare -n -m true 2>/dev/null; then
    printf '127.0.0.1 nobody\n' >"$out/hosts"
    # shellcheck disable=SC2016
    variation no-names unshare -n -m sh -c \
        'ip link set lo up && mount --bind "$0" /etc/hosts && exec "$@"' "$out/hosts"
else
    skip no-names "only root may make a network namespace"
fi
user=(unshare --user --map-user 1000 --map-group 1000)  # owns the same files, without privileges
if [ "$(id -u)" != 0 ]; then
    skip user "these tests run without root already"
elif "${user[@]}" true 2>/dev/null; then
    variation user "${user[@]}"
else
    skip user "user namespaces are not permitted here"
fi
# A venv of its own, which sees the packages and the programs of the other one.
of_default=$python
programs=$(cd "$(dirname "$python")" && pwd)
for version in 2.9.0 2.14.1; do
    name=torch-${version%.*}
    venv=.venv-$name
    if [ ! -e "$venv/.ready" ]; then
        if [[ " ${NAMES:-} " != *" $name "* ]]; then
            skip "$name" "$venv is missing: NAMES=$name installs it, up to 7 GB"
            continue
        fi
        grep -v '^torch==' constraints.txt >"$out/constraints.txt"
        if ! { "$of_default" -m venv --clear "$venv" &&
            "$venv/bin/python" -m pip install --quiet --constraint "$out/constraints.txt" "torch==$version"; }; then
            failed+=("$name")
            continue
        fi
        purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
        "$of_default" -c "$purelib" >"$("$venv/bin/python" -c "$purelib")/zz_other_packages.pth"
        touch "$venv/.ready"
    fi
    python=$PWD/$venv/bin/python
    variation "$name" env PYTHONPATH="$PWD/src:$PWD/packages/shardwise-legacy/src:$PWD" PATH="$PWD/$venv/bin:$programs:$PATH"
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
