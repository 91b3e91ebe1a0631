#!/bin/busybox sh
# The guest's first process: modules, this machine's tree read-only as the root, the shared folder, then the
# agent. The shared folder has start.sh, which the host wrote: it knows the Python to use and the addresses.
B=/bin/busybox
say() { echo "init: $*" >/dev/kmsg; }
give_up() { say "$*"; echo "init: $*" >/dev/console; $B poweroff -f; }

$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
for module in $($B cat /modules/order); do
    $B insmod "/modules/$module" || say "module $module was not loaded"
done
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose host /root ||
    give_up "the host's tree cannot be mounted"
for place in dev proc sys; do $B mount --move /$place /root/$place; done
$B mount -t tmpfs -o mode=755 run /root/run
$B mkdir -p /root/run/share /root/run/tmp /root/dev/shm /root/dev/pts
$B mount -t tmpfs shm /root/dev/shm
$B mount -t devpts pts /root/dev/pts
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none share /root/run/share ||
    give_up "the shared folder cannot be mounted"
exec $B switch_root /root /bin/sh /run/share/start.sh
