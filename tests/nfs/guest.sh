#!/bin/bash
# The first process of the guest: exports /srv/disk, mounts it as two clients, and runs pytest.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp
for folder in /tmp /run /srv /mnt /var/lib/nfs; do
    mount -t tmpfs tmpfs "$folder"
done
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o size=2g tmpfs /dev/shm
mkdir -p "$OUT" # it may be below /tmp
mount -t hostfs none "$OUT" -o "$OUT" # the root is read-only
exec >"$OUT/setup" 2>&1
set -x

mkdir -p /tmp/modules/lib/modules
ln -s "/usr/lib/uml/modules/$(uname -r)" /tmp/modules/lib/modules/
for module in nfsd nfsv4 veth; do
    modprobe -d /tmp/modules "$module"
done
ip link set lo up
mkdir -p /srv/disk /var/lib/nfs/rpc_pipefs /var/lib/nfs/nfsdcld
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
mkfs.ext4 -q -F -m 0 /dev/ubda
mount /dev/ubda /srv/disk
chmod 1777 /srv/disk
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs
echo 10 >/proc/fs/nfsd/nfsv4gracetime
echo 10 >/proc/fs/nfsd/nfsv4leasetime
exportfs -o rw,no_root_squash,fsid=0,insecure,no_subtree_check,sync "*:/srv/disk"
nfsdcld -F >/dev/null 2>&1 &
rpc.mountd -N 2 -N 3
rpc.nfsd -N 3 8

# Each client is a network namespace with its own host name, because a server of NFS takes clients of
# one name for one client that has restarted.
for number in 1 2; do
    ip netns add "client$number"
    ip link add "server$number" type veth peer name eth0 netns "client$number"
    ip addr add "10.0.$number.1/24" dev "server$number"
    ip link set "server$number" up
    ip -n "client$number" addr add "10.0.$number.2/24" dev eth0
    ip -n "client$number" link set eth0 up
    mkdir -p "/mnt/client$number"
    nsenter --net="/run/netns/client$number" unshare --uts bash -c "hostname client$number &&
        mount -t nfs4 -o vers=4.2,hard 10.0.$number.1:/ /mnt/client$number"
done

set +x
cd "$REPOSITORY" || exit
export PYTHONPATH="$REPOSITORY/src:$REPOSITORY" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
export SHARDWISE_TESTS_NFS=/mnt/client1:/mnt/client2
eval "set -- $(cat "$OUT/arguments")"
"$PYTHON" -m pytest -p no:cacheprovider --basetemp=/mnt/client1/tests "$@" >"$OUT/log" 2>&1
echo $? >"$OUT/status"
sync
poweroff -f
