"""The record of a machine's switch to another root file system, and the candidate that boots next to the machine."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.state.records import Record
from agent.model.paths import SWITCHES, candidate_of, machine_root, switch_record
from agent.system.files import System
from agent.system.trust import read_seen

HELD_BACK = (
    "kubelet.service",
    "unbounded-agent-joined.path",
    "unbounded-agent-joined.service",
    "unbounded-agent-dra.path",
    "unbounded-agent-dra.service",
    "unbounded-agent-node-condition.path",
    "unbounded-agent-node-condition.timer",
    "unbounded-agent-node-condition.service",
    "unbounded-agent-gpu-test.path",
)
"""The units that make a machine a node. A candidate's systemd starts none: it masks them (kernel-command-line(7))."""


State = Literal["trying", "handing over", "done", "failed"]


class Switch(Struct, frozen=True):
    """How far the last switch of a machine came. Which root file system serves is the one under the machine's name."""

    state: State
    """`trying`: the machine serves, and the candidate is made or boots. `handing over`: the machine stops, and starts
    with the other root file system. `failed`: the former one serves."""
    image: str
    since: float
    """Since when it is in this state, in seconds since the epoch."""
    reason: str = ""
    """Why it failed."""
    keep: bool = False
    """Whether the former root file system has files that the new one lacks: nobody but a user removes it."""

    def problem(self, machine: str) -> str:
        """Return what a user should know of it, in a sentence; empty if there is nothing."""
        again = f"run `unbounded-agent switch {machine}` again"
        if self.state == "failed":
            return f"machine {machine} was not switched to {self.image}, and runs as before: {self.reason}; {again}"
        if self.state == "handing over":
            return f"the switch of machine {machine} to {self.image} has not ended; if no command works on it, {again}"
        return ""


RECORDS = Record(Switch)


def read_switches(system: System) -> Mapping[str, Switch]:
    """Return the records by machine; a damaged one is discarded. Without the directory's list, there are none."""
    try:
        names = system.entries(SWITCHES)
    except OSError:
        return {}
    found = ((name, RECORDS.read(switch_record(name), system)) for name in names)
    return {name: switch for name, switch in found if switch}


def with_candidates(config: Config, switches: Mapping[str, Switch], system: System) -> tuple[Config, Mapping[str, str]]:
    """Return the configuration with the candidates that exist, and the machine of each candidate, by its name."""
    found = {
        candidate_of(name): name
        for name, switch in switches.items()
        if switch.state == "trying"
        and name in config.machines
        and candidate_of(name) not in config.machines
        # Other users than root may not look there.
        and read_seen(system.is_directory, machine_root(candidate_of(name))) is not False
    }
    settings = {name: candidate_settings(config.machines[machine]) for name, machine in found.items()}
    return replace(config, machines={**config.machines, **settings}) if found else config, found


def candidate_settings(settings: MachineSettings) -> MachineSettings:
    """Return the settings of a machine's candidate: the same GPUs and limits, without all that only one may have.

    Its network has no link to any other, so that it neither reaches nor hides the machine's addresses and ports.
    """
    extra = {name: keys for name, keys in settings.nspawn.extra.items() if name not in ("Files", "Network")}
    parameters = " ".join(f"systemd.mask={unit}" for unit in HELD_BACK)
    extra |= {"Exec": {**extra.get("Exec", {}), "Parameters": parameters}, "Network": {"Private": "yes"}}
    return replace(
        settings,
        node=None,
        allocation="device-plugin",
        test_gpus=False,
        node_condition=False,
        cordon_node=False,
        validation_markers=False,
        restart_device_plugin=False,
        extra_mounts=[],
        nspawn=replace(settings.nspawn, virtual_ethernet=False, extra=extra),
    )
