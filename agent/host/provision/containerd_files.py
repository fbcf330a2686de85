"""Makes containerd's files for a node: its configuration, and the mirrors of registries. Pure.

The configuration has version 2, which containerd 1.7 and 2.x read. The machine half writes its drop-in in the same
version (agent.machine.containerd.tables).
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import tomlkit

from agent.config.node import ContainerdSettings
from agent.host.provision.kubelet_files import CONTAINERD_SOCKET
from agent.model.node import NodeFile

MAIN = "/etc/containerd/config.toml"
CERTS = "/etc/containerd/certs.d"
CNI_SETTINGS = "/etc/cni/net.d"
IMPORT = "/etc/containerd/conf.d/*.toml"
"""Drop-ins of the image and of the machine half. If the configuration did not import them, the machine half would add
this import to it."""
CRICTL = "/etc/crictl.yaml"
SERVERS = {"docker.io": "https://registry-1.docker.io"}
"""By registry: its server, if the server has another name than the registry."""
EVERY = "_default"
"""containerd's name for every registry without a directory of its own."""


def containerd_files(settings: ContainerdSettings, header: str) -> tuple[NodeFile, ...]:
    """Return containerd's files, and crictl's file. `header` is the comment at the start of each."""
    texts = {
        MAIN: tomlkit.dumps(_configuration(settings)),
        CRICTL: f"runtime-endpoint: {CONTAINERD_SOCKET}\n",
        **{
            f"{CERTS}/{registry}/hosts.toml": tomlkit.dumps(_hosts(registry, mirrors))
            for registry, mirrors in settings.mirrors.items()
        },
    }
    return tuple(NodeFile(path, (header + text).encode()) for path, text in texts.items())


def _configuration(settings: ContainerdSettings) -> dict[str, Any]:
    runc = {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": True}}
    cri: dict[str, Any] = {
        "cni": {"bin_dir": settings.cni_binaries, "conf_dir": CNI_SETTINGS},
        "containerd": {"default_runtime_name": "runc", "runtimes": {"runc": runc}},
        "registry": {"config_path": CERTS},
    }
    if settings.sandbox_image:
        cri = {"sandbox_image": settings.sandbox_image, **cri}
    return {"version": 2, "imports": [IMPORT], "plugins": {"io.containerd.grpc.v1.cri": cri}}


def _hosts(registry: str, mirrors: Sequence[str]) -> dict[str, Any]:
    """Return a registry's hosts.toml: its mirrors, in the order in which containerd tries them, and its own server."""
    server = {} if registry == EVERY else {"server": SERVERS.get(registry, f"https://{registry}")}
    return {**server, "host": {url: _mirror(url) for url in mirrors}}


def _mirror(url: str) -> dict[str, Any]:
    mirror: dict[str, Any] = {"capabilities": ["pull", "resolve"]}
    if urlsplit(url).path.startswith("/v2/"):
        # The URL names a repository of a proxy (Harbor, Artifactory). Without this key, containerd would append
        # another /v2.
        mirror["override_path"] = True
    return mirror
