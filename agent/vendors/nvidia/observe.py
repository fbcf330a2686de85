"""Observes NVIDIA's GPUs and driver on a host."""

from agent.model.facts import VendorFacts
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.devices.gpus import observe_gpus
from agent.vendors.nvidia.devices.nodes import observe_devices
from agent.vendors.nvidia.driver import observe_driver, observe_module, observe_services
from agent.vendors.nvidia.user_space.observe import observe_user_space


def observe_nvidia(sources: Sources) -> VendorFacts:
    """Return all facts about NVIDIA. What cannot be observed is Unseen; `problems` says what must not be used."""
    module = observe_module(sources.system)
    listed = observe_gpus(sources.system, sources.pci, sources.lost, sources.detached)
    devices = observe_devices(sources, listed)
    user_space = observe_user_space(sources, module if isinstance(module, str) else "")
    return VendorFacts(
        vendor="nvidia",
        gpus=listed.gpus,
        devices=devices.nodes,
        driver=observe_driver(sources, module, user_space, devices.nodes),
        services=observe_services(sources.system),
        problems=(*listed.problems, *devices.problems, *user_space.problems),
        incomplete=devices.incomplete,
    )
