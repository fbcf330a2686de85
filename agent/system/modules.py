"""Loads kernel modules. modprobe(8) loads each one, so that the host's modprobe.d can forbid it."""

from agent.model.errors import AgentError
from agent.system.files import System

RELEASE = "/proc/sys/kernel/osrelease"


def is_loaded(module: str, system: System) -> bool:
    """Return whether a module is loaded, or built into the kernel."""
    name = module.replace("-", "_")
    if system.exists(f"/sys/module/{name}"):
        return True
    path = f"/lib/modules/{system.read_text(RELEASE).strip()}/modules.builtin"
    return system.exists(path) and f"/{name}.ko" in system.read_text(path).replace("-", "_")


def load_module(module: str, timeout: float, system: System) -> None:
    """Load a module. Raises AgentError if modprobe fails, or if it succeeds without loading the module."""
    # With --use-blacklist, modprobe does not load a blacklisted module, and exits with 0.
    system.run("modprobe", "--use-blacklist", "--", module, timeout=timeout)
    if not is_loaded(module, system):
        raise AgentError(
            f"kernel module {module} was not loaded: modprobe.d blacklists it, or has an alias or install line for "
            f"{module}, or that is not its own name",
            f"see `modprobe --show-depends {module}` and /etc/modprobe.d/; remove that line, or load {module} by hand",
        )
