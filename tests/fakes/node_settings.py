"""Settings of nodes for tests."""

from typing import Any

from agent.config.settings import Config, NodeSettings

TOKEN = "abcdef.0123456789abcdef"
TOKEN_FILE = "/etc/unbounded-agent/token"
CA_FILE = "/etc/unbounded-agent/ca.crt"
CA = b"-----BEGIN CERTIFICATE-----\nsynthetic\n-----END CERTIFICATE-----\n"
NEEDED = {
    "server": "https://10.0.0.1:6443",
    "ca_file": CA_FILE,
    "image": {"repository": "docker://registry.example.com/nodes"},
}


def node_settings(**settings: Any) -> NodeSettings:  # noqa: ANN401
    """Return settings that join with a token, unless they name a program."""
    return NodeSettings.validated(_complete(settings))


def config(**nodes: dict[str, Any]) -> Config:
    """Return a configuration with a machine for each node; the key `nspawn` of a node is its machine's."""
    machines = {}
    for name, settings in nodes.items():
        nspawn = settings.pop("nspawn", {})
        machines[name] = {"nspawn": nspawn, "node": _complete(settings)}
    return Config.validated({"machines": machines})


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    joins = {} if "exec_credential" in settings else {"bootstrap_token": TOKEN_FILE}
    return {**NEEDED, **joins, **settings}
