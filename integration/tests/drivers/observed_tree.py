"""A tree of real packages as a host to observe. Its own ldconfig runs; what the kernel shows is synthetic."""

import shutil
from pathlib import Path

from agent.config.settings import Config
from agent.host.observe.host import Memory, observe
from agent.host.vendors import HOST_VENDORS
from agent.model.facts import Facts
from agent.model.paths import machine_unit
from agent.system.process import Completed, host_runner
from integration.bed.process import run
from tests.fakes.host import Host, ScriptedRunner

MACHINE = "gpu-node"
CONFIG = Config.validated({"machines": {MACHINE: {}}})
QEMU_ARM64 = "qemu-aarch64-static"


class TreeRunner(ScriptedRunner):
    """Runs the tree's own ldconfig, in the environment that the agent gives to every program."""

    def __init__(self, tree: Path, *prefix: str) -> None:
        super().__init__()
        self._tree, self._prefix = tree, prefix

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[0] == "/sbin/ldconfig":
            # ldconfig runs inside the tree, where this computer's paths do not exist.
            arguments = (each.removeprefix(str(self._tree)) for each in argv[1:])
            return host_runner((*self._prefix, *arguments), timeout)
        return super().__call__(argv, timeout)


class Tree(Host):
    """A copy of a tree that shares the files' data with the original: never write to a file in place."""

    def __init__(self, tree: Path, architecture: str = "amd64") -> None:
        self.tree = tree
        self.ldconfig: tuple[str, ...] = ("chroot", str(tree), "/sbin/ldconfig")
        if architecture == "arm64":
            self.ldconfig = (QEMU_ARM64, f"{tree}/sbin/ldconfig", "-r", str(tree))
        machine = {"amd64": "x86_64", "arm64": "aarch64"}[architecture]
        super().__init__(tree, machine, TreeRunner(tree, *self.ldconfig))
        run(self.ldconfig)
        # systemd does not run here; its answers do not matter to these tests.
        units = [machine_unit(MACHINE), *(service for vendor in HOST_VENDORS for service in vendor.services)]
        for unit in units:
            self.bus.unit(unit, "inactive")
        self.bus.version("257")
        self.make_directory(f"/var/lib/machines/{MACHINE}")

    def look(self, module: str) -> Facts:
        """Observe the tree with that version of the kernel module and one GPU."""
        for directory in ("proc", "sys", "dev"):
            shutil.rmtree(self.tree / directory, ignore_errors=True)
        self.pci = self.drm = ()
        self.driver(module, gpus=1)
        return observe(CONFIG, self, self, Memory())
