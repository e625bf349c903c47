#!/bin/sh
# Boots virtual machines whose only program is the given static server, as the first process, from
# an initramfs with nothing else but modules of the kernel; boots.py lists what is proved.
#
# Use: run.sh SERVER. The kernel is Debian's for clouds: the one that is installed, or one that is
# downloaded as a package and unpacked to target/vm, where nothing of it runs. `MEMORY_MIB=n` gives
# the machines so much memory; `ACCELERATOR=kvm` is for a host that has it.
set -eu
server=$1
kernel_package=linux-image-cloud-amd64
home=target/vm

. tests/packages/common.sh

[ "$(uname -m)" = x86_64 ] || skip_all 'this is no x86-64, no machine is booted'
needs 'no machine is booted' qemu-system-x86_64 cpio mke2fs e2fsck python3

# The version of the newest kernel that is installed below $1.
newest() {
	find "$1/boot" -name 'vmlinuz-*-cloud-amd64' 2>/dev/null | sed 's/.*vmlinuz-//' | sort -V | tail -n 1
}

root=
version=$(newest "$root")
if [ -z "$version" ]; then
	root=$home/kernel
	version=$(newest "$root")
fi
if [ -z "$version" ]; then
	needs 'and there is no kernel to boot' apt-get apt-cache dpkg-deb
	package=$(apt-cache depends "$kernel_package" | sed -n 's/^ *Depends: \(linux-image-[0-9]\)/\1/p' | head -n 1)
	[ -n "$package" ] || skip_all "apt knows no $kernel_package"
	rm -rf "$root" "$home/package"
	mkdir -p "$root" "$home/package"
	(cd "$home/package" && apt-get download -qq -o APT::Sandbox::User=root "$package")
	dpkg-deb -x "$home/package/"*.deb "$root"
	rm -rf "$home/package"
	version=$(newest "$root")
fi

# Modules, and those that they need; in which order is the server's business. The last two are for
# the power button.
initramfs=$home/initramfs
rm -rf "$initramfs" "$initramfs.gz"
mkdir -p "$initramfs/modules"
cp "$server" "$initramfs/init"
for module in \
	drivers/virtio/virtio drivers/virtio/virtio_ring drivers/virtio/virtio_pci \
	drivers/virtio/virtio_pci_modern_dev drivers/virtio/virtio_pci_legacy_dev \
	drivers/net/virtio_net drivers/net/net_failover net/core/failover \
	drivers/block/virtio_blk drivers/acpi/button drivers/input/evdev
do
	cp "$root/lib/modules/$version/kernel/$module.ko" "$initramfs/modules/"
done
(cd "$initramfs" && find . | LC_ALL=C sort | cpio --quiet -o -H newc | gzip -9) >"$initramfs.gz"

echo "kernel $version, server $(wc -c <"$server") bytes, initramfs $(wc -c <"$initramfs.gz") bytes"
python3 -B tests/vm/boots.py "$root/boot/vmlinuz-$version" "$initramfs.gz" \
	"${MEMORY_MIB:-96}" "${ACCELERATOR:-tcg}"
