"""A host whose cards are plugged in and out, bound to drivers, and get minors and MIG instances. All is synthetic."""

from pathlib import Path

from agent.host.state.gpus import record_lost
from agent.model.facts import DrmDevice, PciDevice
from agent.model.paths import LOADER_CACHE, PCI_DEVICES
from tests.fakes.host import INFORMATION, Host, ScriptedRunner
from tests.fakes.user_space import LISTED, MAIN, cache_of, put

CAPABILITIES = "/proc/driver/nvidia/capabilities"


class CardHost(Host):
    """A host with NVIDIA's driver, for which anything may happen to cards. What is not possible, does nothing."""

    def __init__(self, tree: Path, runner: ScriptedRunner) -> None:
        super().__init__(tree, runner=runner)
        self.cards: dict[str, tuple[int, int]] = {}
        """The cards on the bus and their minors, by address."""
        self._links = 0

    def is_bound(self, address: str) -> bool:
        return self.exists(f"/proc/driver/nvidia/gpus/{address}/information")

    def free_minor(self, wanted: int) -> int:
        used = {minor for address, (_, minor) in self.cards.items() if self.is_bound(address)}
        free: list[int] = [each for each in (*range(wanted, 8), *range(8)) if each not in used]
        return free[0]

    def plug(self, card: int, address: str, minor: int, *, with_node: bool = True) -> None:
        """Add a card, unless it or another card in its slot is there."""
        if address in self.cards or card in {each for each, _ in self.cards.values()}:
            return
        self.cards[address] = (card, minor)
        # Each card, and each binding, gets names of its own, and so inode numbers as kernfs gives them.
        self._links += 1
        self.make_directory(f"/sys/devices/device-{self._links}")
        self.symlink(f"{PCI_DEVICES}/{address}", f"../../../devices/device-{self._links}")
        assert isinstance(self.pci, tuple)
        self.pci = (*self.pci, PciDevice(address, 0x10DE, 0x030200))
        self.bind(address, minor, with_node=with_node)

    def bind(self, address: str, minor: int, *, with_node: bool = True) -> None:
        """Bind a card to NVIDIA's driver. Its own node may come later."""
        if address not in self.cards or self.is_bound(address):
            return
        card, minor = self.cards[address][0], self.free_minor(minor)
        self.cards[address] = (card, minor)
        self.link_driver(address, "nvidia")
        text = INFORMATION.format(minor=minor, address=address).replace(f"00000000000{minor}\n", f"0000000000a{card}\n")
        self.file(f"/proc/driver/nvidia/gpus/{address}/information", text)
        if with_node:
            self.make_node(address)
        assert isinstance(self.drm, tuple)
        for path, number in ((f"/dev/dri/card{minor + 1}", minor + 1), (f"/dev/dri/renderD{128 + minor}", 128 + minor)):
            self.node(path, 226, number)
            self.drm = (*self.drm, DrmDevice(path, address))

    def link_driver(self, address: str, driver: str) -> None:
        """Bind a card to a kernel driver, or to none."""
        self.rebind(address, driver)
        link = Path(self.root, f"{PCI_DEVICES[1:]}/{address}/driver")
        self._links += 1
        if link.is_symlink():
            # Here the number of a removed link could be used again.
            link.rename(link.with_name(f"before-{self._links}"))
        if driver:
            link.symlink_to(f"driver-{self._links}")

    def make_node(self, address: str) -> None:
        if self.is_bound(address):
            self.node(f"/dev/nvidia{self.cards[address][1]}", 195, self.cards[address][1])

    def unbind(self, address: str, driver: str = "", *, keep_node: bool = False) -> None:
        """Bind a card to another driver or to none. NVIDIA's node may stay, as it does on hosts without udev's rule."""
        if address not in self.cards:
            return
        was_bound, minor = self.is_bound(address), self.cards[address][1]
        self.link_driver(address, driver)
        if not was_bound:
            return
        self.remove_tree(f"/proc/driver/nvidia/gpus/{address}")
        assert isinstance(self.drm, tuple)
        gone = [each.path for each in self.drm if each.pci_address == address]
        self.drm = tuple(each for each in self.drm if each.pci_address != address)
        for path in (*gone, *(() if keep_node else (f"/dev/nvidia{minor}",))):
            if self.device_numbers.pop(path, None):
                self.remove_file(path)
        self.destroy_mig(minor)

    def pull(self, address: str) -> None:
        if address in self.cards:
            self.unbind(address)
            assert isinstance(self.pci, tuple)
            self.pci = tuple(each for each in self.pci if each.address != address)
            self.remove_file(f"{PCI_DEVICES}/{address}")
            del self.cards[address]

    def lose(self, address: str) -> None:
        """Let the kernel log say that the card no longer answers."""
        if self.is_bound(address):
            record_lost(self, address, "Xid 79: the GPU has fallen off the bus")

    def make_mig(self, address: str, instance: int) -> None:
        if self.is_bound(address):
            minor = self.cards[address][1]
            for number, name in enumerate(("", "/ci0")):
                capability = 10 + 20 * minor + 2 * instance + number
                self.capability(f"gpu{minor}/mig/gi{instance}{name}/access", capability)

    def destroy_mig(self, minor: int) -> None:
        """Destroy all MIG instances of a card. Their nodes stay."""
        self.remove_tree(f"{CAPABILITIES}/gpu{minor}")

    def install(self, version: str) -> None:
        """Replace the driver's files as a package manager does; without a version, remove them."""
        for path in Path(self.full_path("/usr")).rglob("lib*.so*"):
            path.unlink()
        if version:
            put(self, LISTED, version, *MAIN)
        self.remove(LOADER_CACHE)
        self.loader_cache(cache_of(*(f"{LISTED}/{name}.so.1" for name in MAIN if version)))

    def load_module(self, version: str) -> None:
        """Load the module of this version; without a version, unload it."""
        self.remove("/sys/module/nvidia/version")
        if version:
            self.file("/sys/module/nvidia/version", f"{version}\n")
