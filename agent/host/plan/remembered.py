"""Plans the record of granted GPUs: which to remember, and since when some are lost. Pure."""

from collections.abc import Container, Iterable

from agent.config.settings import Config
from agent.model.actions import Action, WriteFile
from agent.model.facts import Absent, Broken, Facts, Seen, Unseen
from agent.model.goal import MachineGoal, OwnedFile
from agent.model.paths import REMEMBERED_GPUS
from agent.model.remembered import Remembered, RememberedGpu, render_remembered


def remember(
    config: Config, facts: Facts, goals: Iterable[MachineGoal], held: Container[str], now: float
) -> Seen[Remembered]:
    """Return the record as it should be. `held` contains the machines that keep what they have.

    If the address of a recorded GPU is gone from the PCI bus, the GPU is lost. There are two exceptions, in which the
    GPU leaves the record: its UUID is now at another address, or the settings of its machines no longer request it. A
    GPU that is still on the bus leaves the record once no machine has it.
    """
    before = facts.remembered
    if isinstance(before, Unseen | Absent):
        return before
    if isinstance(before, Broken):
        before = Remembered(damage=before.why)
    if not all(isinstance(vendor.devices, tuple | Absent) for vendor in facts.vendors):
        # If the PCI bus could not be listed, every GPU would seem to be lost.
        return before
    granted: dict[str, set[str]] = {}
    for goal in goals:
        for address in (address for grant in goal.grants for address in grant.gpus):
            granted.setdefault(address, set()).add(goal.name)
    recorded = {each.pci_address: each for each in before.gpus}
    present = {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}
    uuids = {gpu.uuid for gpu in present.values() if gpu.uuid}
    gpus = []
    for address in sorted({*recorded, *granted}):
        gpu, old = present.get(address), recorded.get(address)
        if gpu is not None:
            model, uuid = (old.model, old.uuid) if old else ("", "")
            keeping = [name for name in (old.machines if old else ()) if name in held and name in config.machines]
            machines = tuple(sorted({*granted.get(address, ()), *keeping}))
            entry = RememberedGpu(address, gpu.vendor, gpu.model or model, gpu.uuid or uuid, machines)
        elif old is not None and old.uuid not in uuids:
            machines = tuple(name for name in old.machines if _is_requested(old, name, config))
            lost_since = old.lost or now
            entry = RememberedGpu(address, old.vendor, old.model, old.uuid, machines, lost_since)
        else:
            continue
        if entry.machines:
            gpus.append(entry)
    return Remembered(tuple(gpus), before.damage)


def record_remembered(remembered: Seen[Remembered], facts: Facts) -> list[Action]:
    """Return the steps that write missing or outdated copies of the record; none if it is empty and no copy exists."""
    files = remembered_files(remembered)
    contents = {file.path: facts.files[file.path].content for file in files}
    if remembered == Remembered() and all(isinstance(each, Absent) for each in contents.values()):
        return []
    return [WriteFile(file.path, file.content) for file in files if contents[file.path] != file.content]


def remembered_files(remembered: Seen[Remembered]) -> tuple[OwnedFile, ...]:
    """Return both copies of the record, in the order of writing; none if the record could not be read."""
    if not isinstance(remembered, Remembered):
        return ()
    content = render_remembered(remembered)
    return tuple(OwnedFile(path, content) for path in REMEMBERED_GPUS)


def _is_requested(gpu: RememberedGpu, machine: str, config: Config) -> bool:
    """Return whether the machine's settings still request a GPU that is no longer on the PCI bus."""
    if machine not in config.machines:
        return False
    wanted = config.machines[machine].gpus
    # The texts `all` and `count=N` name no GPU: they request any that the machine had.
    return isinstance(wanted, str) or gpu.pci_address in wanted or gpu.uuid in wanted
