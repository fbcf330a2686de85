"""Compares the host's settings with those that it had before its first node. Pure."""

from agent.model.node import HostState


def needs_restoring(found: HostState, now: HostState) -> bool:
    """Return whether there is something to restore: a difference, or a module or directory that `up` may have added."""
    modules = any(now.modules.get(module) for module, loaded in found.modules.items() if not loaded)
    directories = not {*found.absent_directories} <= {*now.absent_directories}
    return modules or directories or bool(since_found(found, now))


def since_found(found: HostState, now: HostState) -> tuple[str, ...]:
    """Return what differs from the host as it was found, one sentence each.

    Three things are not compared. The first are modules, because `reset` leaves those that are in use. The second are
    parameters that did not exist when the host was found: a module brought them, and they stay as long as the module.
    The third are directories, because `reset` leaves those in which others have put files.
    """
    differences = [
        f"{name} {'does not exist' if current is None else f'is {current}'}, and was {value}"
        for name, value in found.sysctls.items()
        if value is not None and (current := now.sysctls.get(name)) != value
    ]
    swaps = {swap.path for swap in now.swaps}
    differences += [f"{swap.path} is no longer used as swap" for swap in found.swaps if swap.path not in swaps]
    for path, file in found.files.items():
        if now.files.get(path) != file:
            differences.append(f"{path} still exists" if file is None else f"{path} is not as it was")
    return tuple(differences)
