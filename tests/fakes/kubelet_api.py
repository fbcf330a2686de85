"""The messages of the kubelet's APIs as Google's library reads and writes them, for what is encoded by hand.

The fields are those of the .proto files in k8s.io/kubelet/pkg/apis: pluginregistration/v1, dra/v1, dra-health/v1alpha1.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "kubelet"
KINDS = {"string": 9, "bool": 8, "int64": 3, "enum": 5}
"""Types of fields (FieldDescriptorProto.Type). An enum is read as int32, which is encoded in the same way."""

MESSAGES: dict[str, tuple[str, ...]] = {
    "InfoRequest": (),
    "PluginInfo": ("string type", "string name", "string endpoint", "repeated string supported_versions"),
    "RegistrationStatus": ("bool plugin_registered", "string error"),
    "RegistrationStatusResponse": (),
    "Claim": ("string namespace", "string uid", "string name"),
    "NodePrepareResourcesRequest": ("repeated Claim claims",),
    "NodePrepareResourcesResponse": ("map NodePrepareResourceResponse claims",),
    "NodePrepareResourceResponse": ("repeated Device devices", "string error"),
    "Device": (
        "repeated string request_names",
        "string pool_name",
        "string device_name",
        "repeated string cdi_device_ids",
        "optional string share_id",
    ),
    "NodeUnprepareResourcesRequest": ("repeated Claim claims",),
    "NodeUnprepareResourcesResponse": ("map NodeUnprepareResourceResponse claims",),
    "NodeUnprepareResourceResponse": ("string error",),
    "NodeWatchResourcesRequest": (),
    "DeviceIdentifier": ("string pool_name", "string device_name"),
    "DeviceHealth": (
        "DeviceIdentifier device",
        "enum health",
        "int64 last_updated_time",
        "int64 health_check_timeout_seconds",
        "string message",
    ),
    "NodeWatchResourcesResponse": ("repeated DeviceHealth devices",),
}
"""The fields of each message, numbered from 1."""


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, declared: str) -> None:
    *labels, kind, name = declared.split()
    field = message.field.add(name=name, number=number, label=3 if labels[:1] in (["repeated"], ["map"]) else 1)
    if kind in KINDS:
        field.type = KINDS[kind]  # type: ignore[assignment]
    else:
        field.type, field.type_name = 11, f".{PACKAGE}.{kind}"  # type: ignore[assignment]
    if labels == ["optional"]:
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if labels == ["map"]:
        entry = message.nested_type.add(name="ClaimsEntry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string key")
        _add_field(entry, 2, f"{kind} value")
        field.type_name = f".{PACKAGE}.{message.name}.ClaimsEntry"


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="kubelet.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, declared in enumerate(fields, 1):
            _add_field(message, number, declared)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _classes()


def make(name: str, /, **fields: object) -> bytes:
    """Return the bytes of a message."""
    encoded: bytes = CLASSES[name](**fields).SerializeToString()
    return encoded


def read(name: str, data: bytes) -> Any:  # noqa: ANN401 (the library makes its classes at run time)
    """Return a message."""
    return CLASSES[name].FromString(data)
