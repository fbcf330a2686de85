"""Reads config.toml and config.d/*.toml, merges them in this order, and validates the result."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from agent.config import node
from agent.config.kubernetes_names import NodeName
from agent.config.nspawn_settings import KeyName, OneLine, SectionName
from agent.config.pod_environment import VariableName, VariableValue
from agent.config.settings import Address, Config, MachineName
from agent.model.errors import ConfigError, NoMachinesError
from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE
from agent.model.toml_document import parse_toml
from agent.system.files import System
from agent.system.path_trust import settings_fault


def load_config(system: System, path: str = CONFIG_FILE) -> Config:
    """Return the validated configuration. If `path` is not CONFIG_FILE, read only that file.

    Raises ConfigError, which names the file and the key.
    """
    try:
        files = [path] if system.exists(path) else []
        if path == CONFIG_FILE and system.is_directory(CONFIG_DIRECTORY):
            names = system.entries(CONFIG_DIRECTORY)
            files += [f"{CONFIG_DIRECTORY}/{name}" for name in names if name.endswith(".toml")]
    except OSError as error:
        # A file that cannot be read must not count as absent: its machines would be removed from the configuration.
        raise ConfigError(f"cannot read {path} or {CONFIG_DIRECTORY}: {error.strerror}") from error
    if not files:
        raise NoMachinesError(
            f"{path}: no such file",
            "create it with a table [machines.NAME] for each machine, or with an empty table [machines] for none",
        )
    merged: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for file in files:
        try:
            # Only the standard files must belong to root: a user who passes --config is responsible for that file.
            _merge(merged, _parse(system, file, root_owned=path == CONFIG_FILE), file, origins, ())
        except RecursionError as error:
            raise ConfigError(f"{file}: tables or lists are nested too deeply", "nest them less deeply") from error
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        # NoMachinesError only if nothing else is wrong: another mistake may be the reason why there is no table.
        no_machines = [(each["type"], each["loc"]) for each in error.errors()] == [("missing", MACHINES_KEY)]
        raise (NoMachinesError if no_machines else ConfigError)(_error_lines(error, origins, files[-1])) from error


def _parse(system: System, file: str, *, root_owned: bool) -> dict[str, Any]:
    try:
        if root_owned and (fault := settings_fault(system, file)):
            raise ConfigError(f"{file}: refused, because it decides what root does on this host: {fault}")
        return parse_toml(system.read(file).decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot read it: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error


def _merge(
    into: dict[str, Any],
    new: Mapping[str, Any],
    file: str,
    origins: dict[tuple[str, ...], str],
    parents: tuple[str, ...],
) -> None:
    """Merge `new` into `into`: merge tables, replace other values. Record in `origins` which file each key is from.

    `parents` are the keys of the tables around `new`.
    """
    for key, value in new.items():
        origins[(*parents, key)] = file
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, file, origins, (*parents, key))
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value, file, origins, (*parents, key))
        else:
            into[key] = value


def _error_lines(error: ValidationError, origins: dict[tuple[str, ...], str], default_file: str) -> str:
    """Return pydantic's errors as `FILE: KEY: what is wrong`, one line per key."""
    sentences: dict[tuple[str, ...], str] = {}
    for each in error.errors():
        # pydantic adds the names of union members and "[key]" to the location. These are not keys in the file.
        keys = tuple(str(part) for part in each["loc"])
        named = next((keys[:length] for length in range(len(keys), 0, -1) if keys[:length] in origins), ())
        file = origins.get(named, default_file)
        if each["type"] == "missing" or (each["type"] == "extra_forbidden" and named != keys):
            # Name the whole location: neither a missing key nor a key of a table in a list is in `origins`.
            named = keys
        sentences.setdefault(named, f"{file}: {'.'.join(named or keys)}: {_what_is_wrong(each)}")
    return "\n".join(sentences.values())


def _what_is_wrong(error: ErrorDetails) -> str:
    if error["type"] == "string_pattern_mismatch":
        # pydantic's message would show only the regular expression.
        pattern = error["ctx"]["pattern"]
        quoted = "it" if pattern in MAYBE_SECRET else repr(error["input"])
        return f"{quoted} is not {EXPECTED_FORMS[pattern]}"
    if error["type"] == "missing" and error["loc"] == MACHINES_KEY:
        return "is missing; add a table [machines.NAME] for each machine, or an empty table [machines] for none"
    return MESSAGES.get(error["type"]) or error["msg"].removeprefix("Value error, ")


MESSAGES = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "string_type": "must be a string (some keys also accept a list of strings)",
}
"""What is wrong, by pydantic's type of error; for other types, pydantic's own message is used."""


def _pattern(constrained: object) -> str:
    constraints: StringConstraints = get_args(constrained)[1]
    return str(constraints.pattern)


EXPECTED_FORMS = {
    _pattern(MachineName): "a host name (letters, digits, hyphens and underscores, parts joined by dots)",
    _pattern(OneLine): "one line of text that does not end in a backslash",
    _pattern(Address): "an address with a port, such as 127.0.0.1:9788 or [::1]:9788",
    _pattern(SectionName): "the name of a section, such as Files",
    _pattern(KeyName): "the name of a setting, such as Bind",
    _pattern(VariableName): "the name of an environment variable",
    _pattern(VariableValue): "one line of text",
    _pattern(NodeName): "a DNS name (lower-case letters, digits and hyphens, parts joined by dots)",
    _pattern(node.ImageName): "an image: docker://REGISTRY/NAME:TAG, oci:/DIRECTORY:TAG or docker-archive:/FILE:TAG",
    _pattern(node.Repository): "a repository, such as docker://registry.example.com/nodes",
    _pattern(node.Tag): "a tag of an image",
    _pattern(node.Version): "a version, such as 1.36.3",
    _pattern(node.Sha256): "a SHA-256 digest: 64 hexadecimal digits in lower case",
    _pattern(node.Url): "a URL with http or https, and without a user name",
    _pattern(node.ServerUrl): "an API server, such as https://10.0.0.1:6443",
    _pattern(node.Registry): "a registry, such as docker.io or registry.example.com:5000",
    _pattern(node.SecretFile): "an absolute path, or credential:NAME; the secret itself must not be here",
    _pattern(node.SysctlName): "the name of a kernel parameter, such as vm.overcommit_memory",
    _pattern(node.SysctlValue): "one line of text",
    _pattern(node.KernelModule): "the name of a kernel module",
}
"""What a value must be, by the regular expression that it did not match."""
MAYBE_SECRET = {_pattern(each) for each in (OneLine, VariableValue, node.SecretFile, node.Url)}
"""Regular expressions of values that errors never quote: everyone can read the conditions and pages with the errors."""
MACHINES_KEY = ("machines",)
