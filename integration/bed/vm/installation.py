"""Install the host half on the simulated host by `systemd/install`, as docs/install.md says, with two differences.

The simulated host has no network. So the agent's wheel is built outside, from this checkout, and the locked
dependencies come from an environment in the host's image (AGENT_ENVIRONMENT in host_image), which lacks only the agent.
"""

from integration.bed import wheels
from integration.bed.cache import REPOSITORY
from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Guest

CHECKOUT = "/root/unbounded-agent"
CONFIGURATION = f"[machines.{MACHINE}]\n"


def install(guest: Guest, configuration: str = CONFIGURATION) -> None:
    """Install everything but start nothing: `unbounded-agent apply` or the service is the next step."""
    wheel = wheels.agent()
    guest.write(f"{CHECKOUT}/{wheel.name}", wheel.read_bytes(), 0o644)
    files = [REPOSITORY / "requirements.lock", REPOSITORY / "agent/system/removal.py"]
    files += [path for path in (REPOSITORY / "systemd").iterdir() if path.is_file()]
    for file in files:
        executable = bool(file.stat().st_mode & 0o100)
        guest.write(f"{CHECKOUT}/{file.relative_to(REPOSITORY)}", file.read_bytes(), 0o755 if executable else 0o644)
    guest.run([f"{CHECKOUT}/systemd/install", f"{CHECKOUT}/{wheel.name}"], timeout=300)
    guest.write("/etc/unbounded-agent/config.toml", configuration.encode())
