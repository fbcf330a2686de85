"""A host without any fault, for tests that seed one."""

from agent.cli.doctor.host import SERVICE
from tests.fakes.host import Host

SOCKETS = "  sl  local_address rem_address   st tx_queue\n   0: 0100007F:{port:04X} 00000000:0000 {state} 0:0\n"
KERNEL = "6.12.0-1-amd64"


def make_sound(host: Host) -> None:
    """Add what `doctor` expects of a host: a service that serves metrics, settings and modules of the kernel."""
    host.bus.unit(SERVICE)
    for name, value in (("vm/overcommit_memory", "1"), ("kernel/panic", "10"), ("kernel/panic_on_oops", "1")):
        host.file(f"/proc/sys/{name}", f"{value}\n")
    host.file("/proc/net/tcp", SOCKETS.format(port=9788, state="0A"))
    host.file("/proc/sys/kernel/osrelease", f"{KERNEL}\n")
    host.file(f"/lib/modules/{KERNEL}/modules.dep", "updates/dkms/nvidia-current.ko.xz:\nkernel/i915.ko:\n")
    host.file(f"/lib/modules/{KERNEL}/modules.builtin", "kernel/drivers/gpu/drm/simpledrm.ko\n")
