#!/bin/sh
# run.sh DIR SHARE SCRIPT: boots the machine that build.sh made in DIR, runs `sh SCRIPT` in it as root
# with folder SHARE as its working directory, and powers off.
#
# The guest sees this machine's files, and can write to SHARE only. It writes the script's output to
# SHARE/output.txt and its exit status to SHARE/status; run.sh exits with this status. If there is none,
# SHARE/console.txt helps to find out why. The guest has no network to the outside.
#
# The processor is emulated, because virtual machines seldom allow virtual machines inside. It is an old
# model without AVX, because emulated AVX would be slower than SSE. There is only one: two would wait for
# each other in loops whenever a busy host runs one of them, and take a third more time.
# LIMIT is the time limit in seconds (300).
set -eu
directory=$(realpath "${1:?usage: dev/testbed/rdma_vm/run.sh DIR SHARE SCRIPT}")
share=$(realpath "${2:?usage: dev/testbed/rdma_vm/run.sh DIR SHARE SCRIPT}")
script=$(realpath "${3:?usage: dev/testbed/rdma_vm/run.sh DIR SHARE SCRIPT}")

rm -f "$share/status" "$share/output.txt"
timeout "${LIMIT:-300}" qemu-system-x86_64 \
    -nodefaults -no-user-config -no-reboot -display none -serial "file:$share/console.txt" \
    -monitor none -M pc -accel tcg -cpu Nehalem -smp 1 -m 2048 \
    -kernel "$directory/vmlinux" -initrd "$directory/initrd.gz" \
    -append "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off nokaslr share=$share script=$script" \
    -virtfs local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap \
    -virtfs "local,path=$share,mount_tag=share,security_model=none,multidevs=remap" </dev/null ||
    echo "qemu ended with status $?" >&2
if [ ! -f "$share/status" ]; then
    echo "the guest did not finish; the end of $share/console.txt:" >&2
    tail -n 5 "$share/console.txt" >&2
    exit 1
fi
exit "$(cat "$share/status")"
