"""What differs from the host as it was found."""

from msgspec.structs import replace

from agent.host.provision.plan import since_found
from agent.model.node import FoundFile, HostState
from agent.model.typed_json import Base64
from tests.fakes.provisioned import FOUND

CHANGED = HostState(
    sysctls={"kernel.panic": "10", "net.bridge.bridge-nf-call-iptables": "1"},
    modules={"overlay": True, "br_netfilter": True},
    swaps=(),
    files={"/etc/a": FoundFile(Base64(b"ours"), 0o644), "/etc/b": None},
)


def test_each_difference_is_a_sentence() -> None:
    assert since_found(FOUND.host, CHANGED) == (
        "kernel.panic is 10, and was 0",
        "/dev/sda2 is no longer used as swap",
        "/etc/a still exists",
        "/etc/b is not as it was",
    )


def test_a_parameter_that_no_longer_exists() -> None:
    gone = replace(FOUND.host, sysctls={**FOUND.host.sysctls, "kernel.panic": None})
    assert since_found(FOUND.host, gone) == ("kernel.panic does not exist, and was 0",)


def test_modules_that_were_loaded_and_their_parameters_may_stay() -> None:
    sysctls = {**FOUND.host.sysctls, "net.bridge.bridge-nf-call-iptables": "1"}
    assert (
        since_found(
            FOUND.host,
            replace(FOUND.host, sysctls=sysctls, modules={"overlay": True, "br_netfilter": True}),
        )
        == ()
    )
