#!/bin/sh
# build.sh DIR: makes the virtual machine that run.sh boots. DIR gets `vmlinux`, Debian's own kernel, and
# `initrd.gz`, which loads the modules of Soft-RoCE and then uses this machine's root file system, read-only.
#
# It installs nothing. It downloads one package, or nothing if DIR has the machine already. If the machine
# cannot be made here, the exit status is 77 and the last line says why.
set -eu
directory=${1:?usage: dev/testbed/rdma_vm/build.sh DIR}
here=$(dirname "$(realpath "$0")")
mkdir -p "$directory"
cd "$directory"

cannot() {
    echo "no virtual machine: $1" >&2
    exit 77
}

[ "$(uname -m)" = x86_64 ] || cannot "made for x86_64, this is $(uname -m)"
for tool in apt-get apt-cache dpkg python3 qemu-system-x86_64; do
    command -v "$tool" >/dev/null 2>&1 || cannot "$tool is missing (scripts/dependencies.sh test)"
done
busybox=$(command -v busybox) || cannot "busybox is missing (scripts/dependencies.sh test)"

# An existing machine is used if the same versions of these scripts made it.
recipe=$(cat "$here/build.sh" "$here/init" | sha256sum | cut -d' ' -f1)
if [ -f vmlinux ] && [ -f initrd.gz ] && [ "$(cat recipe 2>/dev/null)" = "$recipe" ]; then exit 0; fi
rm -f recipe

# ---- the kernel -----------------------------------------------------------------------------
newest_kernel() {
    apt-cache depends linux-image-amd64 2>/dev/null |
        sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1
}
update() { # where the package lists are missing, or name packages that are gone
    [ "$(id -u)" = 0 ] && apt-get update -qq >>download.log 2>&1
}
package=$(newest_kernel)
[ -n "$package" ] || { update && package=$(newest_kernel); }
[ -n "$package" ] || cannot "no package linux-image-amd64 is known here (apt-get update)"
version=${package#linux-image-}
if ! ls "$package"_*.deb >/dev/null 2>&1; then
    rm -f linux-image-*.deb
    apt-get download -qq "$package" >>download.log 2>&1 ||
        { update && apt-get download -qq "$package" >>download.log 2>&1; } ||
        cannot "apt-get download $package failed: $(tail -n 1 download.log)"
fi
# In the order in which they depend on each other; those that are missing are built in.
modules="crc32_generic virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci netfs fscache 9pnet \
    9pnet_virtio 9p overlay udp_tunnel ip6_udp_tunnel ib_core ib_uverbs rdma_rxe veth llc stp \
    bridge sch_netem"
rm -rf kernel root damaged
mkdir kernel
# Only the files that are needed, since to write all of them takes longer.
{
    echo "./boot/vmlinuz-*"
    for module in $modules; do echo "*/$module.ko*"; done
} >wanted
{ dpkg --fsys-tarfile "$package"_*.deb || touch damaged; } |
    tar -x -C kernel --wildcards -T wanted 2>>download.log || true # some modules are not there
if [ -e damaged ]; then
    rm -f "$package"_*.deb
    cannot "the package $package is damaged"
fi

# A kernel packed by xz is unpacked here, because on an emulated processor it would take seconds to unpack itself. One
# packed in another way does that.
python3 - "kernel/boot/vmlinuz-$version" vmlinux <<'PYTHON'
import lzma
import sys
image = open(sys.argv[1], "rb").read()
start = image.find(b"\xfd7zXZ\0")
try:
    kernel = lzma.LZMADecompressor().decompress(image[start:]) if start >= 0 else image
except lzma.LZMAError:
    kernel = image
open(sys.argv[2], "wb").write(kernel)
PYTHON
unpack() { # FILE: a module without its packing, to standard output
    case $1 in
    *.xz) python3 -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())' "$1" ;;
    *.zst) zstd -dcq "$1" ;;
    *.gz) gzip -dc "$1" ;;
    *) cat "$1" ;;
    esac
}

# ---- the initial RAM disk -------------------------------------------------------------------
mkdir -p root/bin root/modules root/dev root/proc root/sys root/new root/over
cp "$busybox" root/bin/busybox
cp "$here/init" root/init
chmod +x root/init
for module in $modules; do
    file=$(find kernel -name "$module.ko*")
    [ -n "$file" ] || continue # built in
    unpack "$file" >"root/modules/$module.ko" || cannot "the kernel's modules are packed in a way that is unknown here"
    echo "$module" >>root/modules/order
done
(cd root && find . | "$busybox" cpio -o -H newc 2>/dev/null | gzip -1) >initrd.gz
rm -rf kernel root wanted
echo "$recipe" >recipe
