"""Sets the agent's keys in the configuration of nvidia-container-runtime. Pure."""

from typing import Any

from agent.model.errors import AgentError, DocumentError
from agent.vendors.machine_vendor import EDIT_LIMIT
from agent.vendors.nvidia.cdi.verify import KIND

RUNTIME_SETTINGS: dict[str, dict[str, Any]] = {
    # In its default mode, auto, the runtime makes its own specification in memory, without the agent's driver root and
    # hooks. Pods with a RuntimeClass would then not use the specification that the agent published.
    "nvidia-container-runtime": {"mode": "cdi"},
    "nvidia-container-runtime.modes.cdi": {
        "default-kind": KIND,
        "spec-dirs": ["/etc/cdi", "/var/run/cdi"],
        "annotation-prefixes": ["cdi.k8s.io/"],
    },
}
"""Keys that the runtime's configuration must have, by table (api/config/v1/runtime.go in the toolkit's source)."""


def edit_runtime_config(text: str) -> str:
    """Return the text with RUNTIME_SETTINGS set, or `text` itself if they are already set.

    All other settings are kept. Comments are kept if tomlkit can edit the text.
    """
    # Imported here: a run that changes nothing does not need it.
    from agent.model.toml_document import parse_toml

    where = "nvidia-container-runtime's config.toml"
    try:
        wanted, before = parse_toml(text), parse_toml(text)
    except RecursionError as error:
        raise DocumentError(f"{where}: nested too deeply: {error}", "nest tables less deeply, or remove it") from error
    # The text is not TOML, or has a number with more digits than int() accepts.
    except ValueError as error:
        raise DocumentError(f"{where}: not TOML: {error}", "repair or remove it") from error
    try:
        for names, keys in RUNTIME_SETTINGS.items():
            _table(wanted, names.split(".")).update(keys)
        if wanted == before:
            return text
        if len(text) > EDIT_LIMIT:
            raise DocumentError(
                f"{where}: has {len(text)} characters, but the agent edits at most {EDIT_LIMIT}", "shorten or remove it"
            )
        return _with_settings(text, wanted)
    except RecursionError as error:
        raise DocumentError(f"{where}: cannot be edited: its tables are nested too deeply", "repair it") from error


def _with_settings(text: str, wanted: dict[str, Any]) -> str:
    """Return the `wanted` settings as TOML, with the comments of `text` if tomlkit can keep them."""
    # Imported here: the import takes longer than a run that changes nothing.
    import tomlkit

    from agent.model.toml_document import parse_toml

    try:
        edited = _edited(text)
        if parse_toml(edited) == wanted:
            return edited
    # Any exception is caught: tomlkit fails for dotted keys and for unusual orders of tables, and the TOML that it
    # writes may be invalid.
    except Exception:
        pass
    return f"# Setting the agent's keys removed the comments.\n{tomlkit.dumps(wanted)}"


def _edited(text: str) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    for names, keys in RUNTIME_SETTINGS.items():
        table: Any = document
        for name in names.split("."):
            if name not in table:
                table[name] = tomlkit.table()
            table = table[name]
        table.update(keys)
    return tomlkit.dumps(document)


def _table(document: dict[str, Any], names: list[str]) -> dict[str, Any]:
    for number, name in enumerate(names, start=1):
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise AgentError(
                f"nvidia-container-runtime's config.toml: {'.'.join(names[:number])} is not a table",
                "repair or remove it",
            )
    return document
