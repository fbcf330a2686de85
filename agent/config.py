"""The configuration: /etc/unbounded-agent/config.toml and config.d/*.toml, merged in this order, then validated."""

import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from agent.errors import ConfigError
from agent.extras import CDI_MODES, AbsolutePath, CdiModes, ExtraDevices, ExtraMounts, Switches
from agent.paths import CONFIG_DIRECTORY, CONFIG_FILE
from agent.pci_address import as_in_sysfs
from agent.pod_environment import PodEnvironment, VariableName, VariableValue
from agent.system.files import System

GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

MachineName = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*$", max_length=64
    ),
]
"""A host name (machinectl(1)): it becomes part of unit names and paths, so it may hold no slash."""
OneLine = Annotated[str, StringConstraints(pattern=r"^([^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\\])?$")]
"""Text for a line of a unit file: a line break would start a setting of its own, a backslash at the end join two."""
KeyName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$")]
Address = Annotated[str, StringConstraints(pattern=r"^(\[[0-9a-f:.]+\]|[0-9a-zA-Z.-]+):[0-9]{1,5}$")]
PORT_LIMIT = 65535
SectionName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z]*$")]


DROP_IN = re.compile(r"(/[A-Za-z0-9][A-Za-z0-9_.-]*){2,}\.(toml|part)")
"""A path that containerd's imports can name: nothing in it is a pattern's, and no directory is hidden."""


class Model(BaseModel):
    """Immutable; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NspawnSettings(Model):
    """systemd.nspawn(5) settings that a Kubernetes node needs; each default that relaxes something says why."""

    capability: OneLine = "all"
    """The kubelet mounts, sets sysctls and manages cgroups; containerd and runc need most of the rest."""
    private_users: bool = False
    """The kubelet does not run in a user namespace, and device nodes bound into one belong to nobody."""
    system_call_filter: OneLine = "@keyring bpf"
    """runc joins a session keyring and loads BPF device programs; nspawn forbids both by default."""
    virtual_ethernet: bool = False
    """The node uses the host's network."""
    kmsg: bool = True
    """The kubelet watches /dev/kmsg for out-of-memory kills and refuses to start without it."""
    modules: bool = True
    """kube-proxy and CNI plugins look into /lib/modules; it is bound read-only."""
    environment: dict[VariableName, OneLine] = {
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
    }
    """For systemd-nspawn itself: cgroup v2 in the machine, and /proc/sys/net writable for CNI."""
    extra: dict[SectionName, dict[KeyName, OneLine | list[OneLine]]] = {}
    """Further settings by section, such as `extra.Files.Bind = ["/srv/data"]`; appended as they are."""


class MachineSettings(Model):
    """One machine."""

    gpus: OneLine | list[OneLine] = "all"
    """`all`, `count=N`, or a list of PCI addresses and UUIDs."""
    require_gpus: bool = False
    """Whether a host without GPUs makes this machine not ready."""
    driver_wait: Annotated[int, Field(ge=0, le=240)] = 120
    """Seconds that a start of the machine waits for the driver of its GPUs, which may load late in the host's boot."""
    on_detach: Literal["refuse", "drain-wait", "force"] = "refuse"
    """What `gpus detach` does with a GPU of this machine that processes have open."""
    drain_wait: Annotated[int, Field(ge=0, le=86400)] = 600
    """Seconds that `drain-wait` waits for them to end."""
    device_mode: Literal["rw", "rwm"] = "rw"
    """`m` allows mknod in the machine; runc does not need it, it binds the node instead."""
    mig_config: bool = False
    """Grant the capability to change the MIG layout: a privilege, not a device."""
    mig_monitor: bool = False
    """Grant the capability to watch all MIG instances of all GPUs."""
    imex_channels: bool = False
    """Grant the IMEX channels, which reach the memory of other nodes' GPUs."""
    sockets: list[Literal["persistenced", "fabricmanager", "mps"]] = []
    """Daemons of the driver whose sockets the machine and all its pods with GPUs get: each speaks to the whole host."""
    pod_environment: PodEnvironment = {}
    """Variables that every pod gets with a device of the vendor."""
    default_runtime: bool = False
    """Make the vendor's runtime containerd's default, so that pods need no RuntimeClass."""
    containerd_drop_in: str = ""
    """Path in the machine of our part of containerd's configuration; empty for the usual one."""
    restart_device_plugin: bool = False
    """Restart the container of the vendor's device plug-in when it cannot know of a GPU that came or went."""
    node_condition: bool = False
    """Set the condition GPUReady on the machine's Node object, with its kubelet's identity."""
    devices: Switches = []
    """Devices that are no GPUs, by kind: each is a set of the host's nodes."""
    extra_devices: ExtraDevices = []
    """Further ones, each by its path."""
    cdi_modes: CdiModes = []
    """Modes of the vendor's generator, for CDI specs of what is granted beside GPUs, and of their management."""
    extra_mounts: ExtraMounts = []
    """Directories and files of the host that it has from its start on."""
    nspawn: NspawnSettings = NspawnSettings()

    @property
    def beside_gpus(self) -> bool:
        """Whether it gets anything on a host without GPUs too."""
        return bool(self.devices or self.extra_devices or self.extra_mounts)

    @field_validator("gpus")
    @classmethod
    def _gpus(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            if value != "all" and not re.fullmatch(r"count=[1-9][0-9]{0,3}", value):
                raise ValueError('must be "all", "count=N" or a list of PCI addresses and UUIDs')
            return value
        if not value:
            raise ValueError("the list names no GPU")
        for each in value:
            if not as_in_sysfs(each) and not GPU_UUID.fullmatch(each):
                raise ValueError(f"{each!r} is neither a PCI address (0000:01:00.0) nor a UUID (GPU-...)")
        return [as_in_sysfs(each) or each for each in value]

    @field_validator("containerd_drop_in")
    @classmethod
    def _drop_in(cls, value: str) -> str:
        # A file of that name is what drop-ins are added to: containerd's, that of the handler's program.
        if value and (not DROP_IN.fullmatch(value) or value.endswith("/config.toml")):
            raise ValueError(
                f"{value!r} is not an absolute path in the machine that ends in .toml or .part, such as "
                "/etc/cri/conf.d/20-gpu.part (letters, digits, dots, hyphens and underscores)"
            )
        return value

    @model_validator(mode="after")
    def _modes_have_devices(self) -> Self:
        for mode in self.cdi_modes:
            match CDI_MODES[mode]:
                case ("devices", switch) if switch not in self.devices:
                    raise ValueError(f'cdi_modes "{mode}" needs "{switch}" in devices')
                case ("imex_channels", _) if not self.imex_channels:
                    raise ValueError(f'cdi_modes "{mode}" needs imex_channels = true')
        return self


class DriverSettings(Model):
    """The driver of this host's GPUs. While neither root nor libraries are named, its user space is looked for."""

    load_modules: bool = False
    """Load its kernel modules and make its device nodes, where the host has not done so by itself."""
    root: AbsolutePath = "/"
    """A directory with a whole system in it, whose loader cache and links hold below it."""
    library_directories: list[AbsolutePath] = []
    """Below the root, in the order of a loader; instead of a loader cache."""
    binary_directories: list[AbsolutePath] = []
    """Below the root, before the usual ones."""
    data_directories: list[AbsolutePath] = []
    """Below the root, before the usual ones: what has `vulkan`, `glvnd`, `egl` and the like in it."""

    @property
    def configured(self) -> str:
        """The key that says where the libraries are; empty while that is to be found out."""
        if self.library_directories:
            return "driver.library_directories"
        return "driver.root" if "root" in self.model_fields_set else ""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.binary_directories or self.data_directories) and not self.configured:
            raise ValueError("needs root or library_directories too, to say where the driver's libraries are")
        return self


class MetricsSettings(Model):
    """Where Prometheus scrapes."""

    address: Address = "127.0.0.1:9788"

    @field_validator("address")
    @classmethod
    def _port(cls, value: str) -> str:
        if int(value.rpartition(":")[2]) > PORT_LIMIT:
            raise ValueError(f"ports end at {PORT_LIMIT}")
        return value


class Config(Model):
    """Everything that can be configured."""

    machines: dict[MachineName, MachineSettings] = Field(min_length=1)
    metrics: MetricsSettings = MetricsSettings()
    driver: DriverSettings = DriverSettings()


def load_config(system: System, path: str = CONFIG_FILE) -> Config:
    """Raises ConfigError, which names the file and the key."""
    files = [path] if system.exists(path) else []
    if path == CONFIG_FILE and system.is_directory(CONFIG_DIRECTORY):
        files += [f"{CONFIG_DIRECTORY}/{name}" for name in system.entries(CONFIG_DIRECTORY) if name.endswith(".toml")]
    if not files:
        raise ConfigError(f"{path}: there is no such file", "write it, with a table [machines.NAME] for each machine")
    merged: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    for file in files:
        _merge(merged, _parse(system, file), file, origins, ())
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_sentences(error, origins, files[-1])) from error


def _parse(system: System, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(system.read(file).decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error


def _merge(
    into: dict[str, Any], new: Mapping[str, Any], file: str, origins: dict[tuple[str, ...], str], at: tuple[str, ...]
) -> None:
    """Tables are merged, anything else is replaced; `origins` learns which file each key came from."""
    for key, value in new.items():
        origins[(*at, key)] = file
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, file, origins, (*at, key))
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value, file, origins, (*at, key))
        else:
            into[key] = value


def _sentences(error: ValidationError, origins: dict[tuple[str, ...], str], default: str) -> str:
    """Pydantic's errors as `FILE: KEY: what is wrong`, one line for each key."""
    sentences: dict[tuple[str, ...], str] = {}
    for each in error.errors():
        # pydantic adds the names of union members and "[key]" to the location; they are no keys of the file.
        keys = tuple(str(part) for part in each["loc"])
        known = next((keys[:length] for length in range(len(keys), 0, -1) if keys[:length] in origins), ())
        file = origins.get(known, default)
        if each["type"] == "missing" or (each["type"] == "extra_forbidden" and known != keys):
            # Of a table in a list, whose keys no file's record has.
            known = keys
        sentences.setdefault(known, f"{file}: {'.'.join(known or keys)}: {_what(each)}")
    return "\n".join(sentences.values())


def _what(error: ErrorDetails) -> str:
    if error["type"] == "string_pattern_mismatch":
        # By the names' patterns rather than by pydantic's words, which quote them.
        return f"{error['input']!r} is not {FORMS[error['ctx']['pattern']]}"
    if error["type"] == "missing" and error["loc"] == ("machines",):
        return "is missing; a table [machines.NAME] for each machine is needed"
    return WORDS.get(error["type"]) or error["msg"].removeprefix("Value error, ")


WORDS = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "too_short": "at least one machine is needed, as a table [machines.NAME]",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "string_type": "must be a string, or a list of strings where the documentation has one",
}


def _pattern(constrained: object) -> str:
    constraints: StringConstraints = get_args(constrained)[1]
    return str(constraints.pattern)


FORMS = {
    _pattern(MachineName): "a host name (letters, digits, hyphens and underscores, parts joined by dots)",
    _pattern(OneLine): "text of one line that does not end in a backslash",
    _pattern(Address): "an address with a port, such as 127.0.0.1:9788 or [::1]:9788",
    _pattern(SectionName): "the name of a section, such as Files",
    _pattern(KeyName): "the name of a setting, such as Bind",
    _pattern(VariableName): "the name of an environment variable",
    _pattern(VariableValue): "text of one line",
}
