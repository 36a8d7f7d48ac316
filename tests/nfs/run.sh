#!/usr/bin/env bash
# Runs pytest on NFS: `tests/nfs/run.sh PYTHON [ARGUMENTS OF PYTEST]`.
#
# A User Mode Linux, which is a Linux kernel in a process, exports a file system over NFS 4.2, and
# mounts it as two clients. It needs no root, but Debian's packages user-mode-linux, nfs-common and
# nfs-kernel-server. Temporary directories of tests are on the first client. Tests with many processes
# need more mappings: `sysctl vm.max_map_count=1048576`.
set -euo pipefail

python=$(command -v "$1")
shift
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
for program in linux.uml exportfs rpc.nfsd mount.nfs4 mkfs.ext4 ip; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null ||
        { echo "$program is missing: apt install user-mode-linux nfs-kernel-server nfs-common"; exit 2; }
done

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
truncate -s 2G "$out/disk"
printf '%q ' "$@" >"$out/arguments"

# Unknown parameters of the kernel become variables in the environment of init.
TMPDIR=/dev/shm timeout --foreground "${NFS_SECONDS:-3000}" linux.uml mem=4G \
    rootfstype=hostfs rootflags=/ ro "ubd0=$out/disk" "init=$here/guest.sh" \
    "OUT=$out" "REPOSITORY=$repository" "PYTHON=$python" \
    con=null con0=fd:0,fd:1 </dev/null >"$out/console" 2>&1 &
tail --pid=$! -F -n +1 "$out/log" 2>/dev/null || true
wait $! || true
if [ ! -e "$out/status" ]; then
    tail -n 40 "$out/console" "$out/setup"
    echo "the guest did not finish"
    exit 2
fi
exit "$(cat "$out/status")"
