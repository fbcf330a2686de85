"""One QEMU process: the virtual machine of the simulated GPU host, with PCIe hot-plug ports and snapshots."""

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from integration.bed.architecture import CHOSEN
from integration.bed.process import BedError
from integration.bed.vm.emulator import emulator
from integration.bed.vm.json_socket import ClosedError, JSONObject, JSONSocket, JSONValue

PORTS = 12
# /dev/kvm is never used: on some computers it can be opened, but a stock kernel then crashes while it boots.
# With the processor features erms and fsrm, the guest copies by `rep movsb`, which QEMU 10.0 emulates byte by byte:
# reading files took 2.6 times as long. Without them, the guest copies eight bytes or more at a time.
# arm64's `max` has pointer authentication, whose emulation is slow.
BOARD = (
    ("-cpu", "neoverse-n1", "-machine", "virt,gic-version=3")
    if CHOSEN.is_foreign
    else ("-cpu", "max,-erms,-fsrm", "-machine", "q35")
)
MACHINE = ("-accel", "tcg,thread=multi", *BOARD)
# no_timer_check: on a busy computer the emulated timer is late, and the kernel would doubt its interrupt routing.
# clocksource=hpet: the usual clock source, the TSC, keeps counting across QEMU's loadvm. A restored guest would see its
# clock jump by minutes, and its watchdogs would kill services.
# no5lvl: QEMU walks the page tables in software, and a fifth level made everything 20 % slower.
BOARD_ARGUMENTS = "console=ttyAMA0" if CHOSEN.is_foreign else "console=ttyS0 no_timer_check clocksource=hpet no5lvl"
# The last line of arguments turns off hardening and waits. They cost a real processor little, but took a third of the
# emulated processor's time.
KERNEL_ARGUMENTS = (
    f"{BOARD_ARGUMENTS} quiet mitigations=off net.ifnames=0 systemd.show_status=false"
    " init_on_alloc=0 randomize_kstack_offset=off audit=0 nowatchdog rcupdate.rcu_expedited=1"
)


def processors() -> int:
    """Return how many processors a virtual machine has: one if a worker of pytest-xdist starts it, otherwise two.

    A second processor makes most tests only a sixth faster. If there are workers, this computer's second processor does
    more for a second virtual machine.
    """
    return 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


class QemuError(BedError):
    """QEMU failed or did not answer in time."""


def gpu_id(port: int) -> str:
    return f"gpu{port}"


class Qemu:
    """The process starts on construction; `close` stops and reaps it.

    It boots `vmlinuz` and `initrd` of `directory`. `disks` are qcow2 files for vda, vdb, ...
    """

    def __init__(
        self, directory: Path, disks: Iterable[Path], ports: Iterable[int], *,
        memory_mib: int = 4096, snapshot: str | None = None, one_processor: bool = False,
    ) -> None:  # fmt: skip
        self.serial_log = directory / "serial.log"
        self.guest_socket = directory / "guest.sock"
        self.plugged = set(ports)
        self._serial_start = 0
        self._stderr = directory / "qemu.log"
        monitor = directory / "monitor.sock"
        for path in (monitor, self.guest_socket):
            path.unlink(missing_ok=True)
        argv = _command_line(self, monitor, disks, memory_mib)
        argv += ["-smp", "1" if one_processor else str(processors())]
        if snapshot is not None:
            argv += ["-loadvm", snapshot]
        with self._stderr.open("w") as stderr:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
        try:
            self._monitor = self._connect(monitor)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def close(self) -> None:
        """Stop the machine like a power cut, and reap the process; do nothing the second time."""
        if self._process.returncode is not None:
            return
        try:
            self.execute("quit", timeout=5)
        except (QemuError, ClosedError):
            self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._monitor.close()

    def execute(self, command: str, timeout: float = 120, **arguments: JSONValue) -> Any:  # noqa: ANN401
        """Return the value of a QMP command, whose shape depends on the command. Raises QemuError."""
        try:
            self._monitor.send({"execute": command, "arguments": arguments})
            return self._answer(command, timeout)
        except (TimeoutError, ClosedError) as error:
            raise QemuError(f"QMP {command} {arguments}: {error}; {self.evidence()}") from error

    def plug(self, port: int, model: str = "edu") -> None:
        """Hot-plug a simulated GPU into an empty port (0 to PORTS - 1).

        Before a snapshot, plug in only the default `model`: a QEMU that is started to restore a snapshot has no other.
        """
        self.execute("device_add", driver=model, id=gpu_id(port), bus=f"port{port}")
        self.plugged.add(port)

    def unplug(self, port: int, timeout: float = 180) -> None:
        """Ask the guest to release a GPU and wait until it has: about 5 s, the delay of PCIe's attention button."""
        self.execute("device_del", id=gpu_id(port))
        deadline = time.monotonic() + timeout
        while self._exists(gpu_id(port)):
            if time.monotonic() > deadline:
                raise QemuError(f"the guest did not release {gpu_id(port)} within {timeout:.0f} s; {self.evidence()}")
            time.sleep(0.1)
        self.plugged.discard(port)

    def savevm(self, name: str, timeout: float = 300) -> None:
        self._human(f"savevm {name}", timeout)

    def loadvm(self, name: str, timeout: float = 300) -> None:
        """Restore a snapshot, which must have the devices that are plugged now.

        The guest's clock goes back to the time of the snapshot.
        """
        self._human(f"loadvm {name}", timeout)
        self._serial_start = self.serial_log.stat().st_size

    def forward_port(self, port: int) -> None:
        """Forward this TCP port of 127.0.0.1 to the port of the same number in the guest, until `stop_forwarding`."""
        self._human(f"hostfwd_add net tcp:127.0.0.1:{port}-:{port}", 30)

    def stop_forwarding(self, port: int) -> None:
        # Not _human(): this command also prints text if it succeeds.
        arguments: JSONObject = {"command-line": f"hostfwd_remove net tcp:127.0.0.1:{port}"}
        self.execute("human-monitor-command", **arguments)

    def evidence(self) -> str:
        """Return the end of the serial console and of QEMU's own messages, for error messages.

        If the guest's kernel has crashed since the start or the last restored snapshot, the line that says so comes
        first: the trace after it may be longer than the part of the console that is returned.
        """
        serial = self.serial_log.read_bytes()[self._serial_start :] if self.serial_log.exists() else b""
        console = serial.decode(errors="replace")
        crash = "".join(f"\nthe guest's kernel crashed: {line}" for line in console.splitlines() if "] Oops: " in line)
        state = "running" if self._process.poll() is None else f"ended with status {self._process.returncode}"
        messages = self._stderr.read_text()[-1000:]
        return f"QEMU is {state}: {messages!r}{crash}\nend of the serial console:\n{console[-3000:]}"

    def _human(self, line: str, timeout: float) -> None:
        # The monitor's text commands report errors as text; success prints nothing.
        output = self.execute("human-monitor-command", timeout=timeout, **{"command-line": line})
        if output.strip():
            raise QemuError(f"{line}: {output.strip()}; {self.evidence()}")

    def _exists(self, device: str) -> bool:
        return any(item["name"] == device for item in self.execute("qom-list", path="/machine/peripheral"))

    def _connect(self, path: Path) -> JSONSocket:
        deadline = time.monotonic() + 120
        monitor: JSONSocket | None = None
        while monitor is None:
            try:
                monitor = JSONSocket(path)
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise QemuError(f"cannot connect to QEMU's monitor {path}: {error}; {self.evidence()}") from error
                time.sleep(0.05)
        try:
            # With -loadvm, QEMU answers only after it has read the snapshot.
            monitor.receive(timeout=120)
            monitor.send({"execute": "qmp_capabilities"})
            monitor.receive(timeout=120)
        except (TimeoutError, ClosedError) as error:
            raise QemuError(f"QEMU's monitor {path}: {error}; {self.evidence()}") from error
        return monitor

    def _answer(self, command: str, timeout: float) -> Any:  # noqa: ANN401
        deadline = time.monotonic() + timeout
        while True:
            message: JSONObject = self._monitor.receive(max(0.0, deadline - time.monotonic()))
            if "error" in message:
                raise QemuError(f"QMP {command}: {message['error'].get('desc')}; {self.evidence()}")
            if "return" in message:
                return message["return"]


def _command_line(qemu: Qemu, monitor: Path, disks: Iterable[Path], memory_mib: int) -> list[str]:
    # setpriv: if this process is killed, the kernel kills QEMU too.
    argv = ["setpriv", "--pdeathsig", "KILL", *emulator(), *MACHINE, "-m", str(memory_mib)]
    argv += ["-nodefaults", "-no-user-config", "-display", "none", "-serial", f"file:{qemu.serial_log}"]
    argv += ["-qmp", f"unix:{monitor},server=on,wait=off", "-rtc", "base=utc"]
    argv += ["-kernel", f"{monitor.parent}/vmlinuz", "-initrd", f"{monitor.parent}/initrd"]
    argv += ["-append", KERNEL_ARGUMENTS]
    for disk in disks:
        argv += ["-drive", f"file={disk},format=qcow2,if=virtio,cache=unsafe,discard=unmap"]
    argv += ["-device", "virtio-serial", "-chardev", f"socket,path={qemu.guest_socket},server=on,wait=off,id=agent"]
    argv += ["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0", "-device", "virtio-rng-pci"]
    argv += ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]
    for port in range(PORTS):
        argv += ["-device", f"pcie-root-port,id=port{port},chassis={port + 1},slot={port + 1}"]
    for port in sorted(qemu.plugged):
        argv += ["-device", f"edu,id={gpu_id(port)},bus=port{port}"]
    return argv
