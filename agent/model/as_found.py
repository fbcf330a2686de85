"""The host as it was before `up` first changed it, as frozen data. `reset` restores that state. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent.model.network import Network
from agent.model.node import HostState


@dataclass(frozen=True, slots=True)
class AsFound:
    """The record of that state."""

    host: HostState
    units: Mapping[str, bool]
    """Whether each unit that the agent enables was enabled already, by the unit's name."""
    network: Network
    recorded: float
    """When the record was first made, in seconds since the epoch."""

    def extended(self, host: HostState, units: Mapping[str, bool]) -> "AsFound":
        """Return the record with values added: the current values of what `up` will change to make one more node.

        If the record already has a value for the same thing, that value stays, because it is the original one.
        """
        earlier = self.host
        state = HostState(
            sysctls={**host.sysctls, **earlier.sysctls},
            modules={**host.modules, **earlier.modules},
            swaps=(
                *earlier.swaps,
                *(each for each in host.swaps if each.path not in {old.path for old in earlier.swaps}),
            ),
            files={**host.files, **earlier.files},
            absent_directories=tuple(dict.fromkeys((*earlier.absent_directories, *host.absent_directories))),
        )
        return replace(self, host=state, units={**units, **self.units})
