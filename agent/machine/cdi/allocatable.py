"""Publishes which devices pods may get through claims: those in verified CDI specifications.

A document (ALLOCATABLE) lists these devices. agent.dra reads the document, and offers no other devices. The document
exists only while the host's settings ask for Dynamic Resource Allocation.
"""

import json
from collections.abc import Collection, Iterable

from agent.machine.context import Context
from agent.model.allocatable import AllocatableDevice, AllocatableVendor, render_allocatable
from agent.model.conditions import Condition, Status
from agent.model.errors import AgentError
from agent.model.handoff import Request
from agent.model.paths import ALLOCATABLE
from agent.model.text import one_line
from agent.vendors.machine_vendor import MachineVendor


def allocatable_vendor(
    context: Context, vendor: MachineVendor, request: Request, verified: Collection[str], spec_condition: Condition
) -> AllocatableVendor:
    """Return the vendor's devices that pods can get from the published specification, and why some are missing.

    `verified` has the names of the verified specification's devices. It is empty if there is no verified specification.
    `spec_condition` is CDISpecCurrent.
    """
    problem = "" if spec_condition.status is Status.TRUE else one_line(spec_condition.message)
    devices: tuple[AllocatableDevice, ...] = ()
    if verified:
        try:
            spec = json.loads(context.system.read_untrusted(vendor.spec_path)[0])
            devices = vendor.allocatable(spec, request, frozenset(verified))
        except (AgentError, OSError, ValueError, RecursionError) as error:
            # Somebody replaced the specification after it was verified. The next run repairs it.
            problem = f"{vendor.spec_path}: {one_line(str(error))}"
    return AllocatableVendor(vendor.name, devices, problem, request.driver_version)


def publish_allocatable(context: Context, vendors: Iterable[AllocatableVendor]) -> None:
    """Write the document if its content has changed. Raises OSError."""
    content = render_allocatable(vendors)
    try:
        if context.system.read(ALLOCATABLE) == content:
            return
    except OSError:
        # Missing, or damaged: write it again.
        pass
    context.system.write(ALLOCATABLE, content, 0o600)
