"""Loads kernel modules. modprobe(8) loads each one, so that the host's modprobe.d can forbid it."""

from agent.model.errors import AgentError
from agent.system.files import System
from agent.system.trust import entries_if_present

RELEASE = "/proc/sys/kernel/osrelease"


def is_loaded(module: str, system: System) -> bool:
    """Return whether a module is loaded, or built into the kernel."""
    name = module.replace("-", "_")
    if system.exists(f"/sys/module/{name}"):
        return True
    path = f"/lib/modules/{system.read_text(RELEASE).strip()}/modules.builtin"
    return system.exists(path) and f"/{name}.ko" in system.read_text(path).replace("-", "_")


def load_module(module: str, timeout: float, system: System, *, again: bool = False) -> None:
    """Load a module. Raises AgentError if modprobe fails, or if it succeeds without loading the module.

    A blacklisted module is only loaded `again`: then somebody had loaded it in spite of the blacklist.
    """
    # With --use-blacklist, modprobe does not load a blacklisted module, and exits with 0.
    options = () if again else ("--use-blacklist",)
    system.run("modprobe", *options, "--", module, timeout=timeout)
    if not is_loaded(module, system):
        raise AgentError(
            f"kernel module {module} was not loaded: modprobe.d blacklists it, or has an alias or install line for "
            f"{module}, or that is not its own name",
            f"see `modprobe --show-depends {module}` and /etc/modprobe.d/; remove that line, or load {module} by hand",
        )


def unload_order(module: str, system: System) -> tuple[str, ...]:
    """Return the loaded modules that depend on a module, and itself last: each comes before those that it uses.

    The result is empty if the module is not loaded. Raises OSError.
    """
    found = dict[str, None]()

    def add(name: str) -> None:
        if name not in found:
            for holder in entries_if_present(system, f"/sys/module/{name}/holders"):
                add(holder)
            found[name] = None

    if system.exists(f"/sys/module/{module}"):
        add(module)
    return tuple(found)


def unload_module(module: str, timeout: float, system: System) -> None:
    """Unload a module that no other one uses. Raises AgentError."""
    system.run("rmmod", module, timeout=timeout)
