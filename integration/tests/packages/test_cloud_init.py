"""The user data for cloud-init, run by Debian's cloud-init in a bare root, in a network of its own."""

import re
import tomllib
from collections.abc import Iterator

import pytest
import yaml

from agent.config.settings import Config
from integration.bed.cache import REPOSITORY
from integration.bed.packages import Root, debian_root, packages, repository
from integration.bed.process import CommandError

USER_DATA = (REPOSITORY / "deploy/cloud-init/user-data.yaml").read_text()
SOURCE = re.compile(r"^      source: .*\n(?:      key: .*\n(?:        .*\n)+)", re.MULTILINE)
MODULES = """
datasource_list: [NoCloud]
network: {config: disabled}
cloud_init_modules: [write_files]
cloud_config_modules: [apt_configure, runcmd]
cloud_final_modules: [package_update_upgrade_install, scripts_user]
"""
"""The modules that the user data needs. Others would change the computer that runs the test, such as its disks."""
STAGES = ("init --local", "init", "modules --mode=config", "modules --mode=final")


@pytest.fixture
def root() -> Iterator[Root]:
    with debian_root("trixie", "cloud-init") as root:
        yield root


def test_the_configuration_in_it_is_valid() -> None:
    files = {each["path"]: each for each in yaml.safe_load(USER_DATA)["write_files"]}
    text = files["/etc/unbounded-agent/config.toml"]["content"]
    text = text.replace("DIGEST", 64 * "0").replace("API-SERVER", "10.0.0.1").replace("REGISTRY", "registry")
    found = Config.validated(tomllib.loads(text))
    node = found.machines["gpu-node"].node
    assert node is not None
    assert {node.ca_file, node.bootstrap_token} <= files.keys()
    assert files[str(node.bootstrap_token)]["permissions"] == "0600"


@pytest.mark.exhaustive
def test_the_first_boot(root: Root) -> None:
    """Without systemd and a cluster, the last commands only show that they were run."""
    repository(root.path / "srv/packages", packages("1.0")["unbounded-agent"])
    for path in (root.path / "etc/apt").glob("sources.list*"):
        root.run("rm", "-r", f"/etc/apt/{path.name}")
    text, count = SOURCE.subn("      source: deb [trusted=yes] file:/srv/packages ./\n", USER_DATA)
    assert count == 1
    # `up` could change the kernel's parameters, which no namespace has for itself.
    text = text.replace("[unbounded-agent, up]", "[unbounded-agent, preflight]").replace("DIGEST", 64 * "0")
    seed = root.path / "var/lib/cloud/seed/nocloud"
    seed.mkdir(parents=True)
    (seed / "user-data").write_text(text)
    (seed / "meta-data").write_text("instance-id: test\n")
    (root.path / "etc/cloud/cloud.cfg.d/99-test.cfg").write_text(MODULES)

    assert "Valid schema" in root.run("cloud-init", "schema", "--config-file", "/var/lib/cloud/seed/nocloud/user-data")
    stages = " && ".join(f"cloud-init {stage}" for stage in STAGES)
    # Without a network, the first thing that the configuration's node lacks is an address.
    with pytest.raises(CommandError, match=r"node\.kubelet\.node_ip"):
        root.run("unshare", "--net", "--uts", "sh", "-c", f"{stages} 2>&1; unbounded-agent preflight")
    assert root.run("dpkg-query", "--show", "--showformat=${Version}", "unbounded-agent") == "1.0"
    token = root.path / "etc/unbounded-agent/token"
    assert token.read_text().strip() == "BOOTSTRAP-TOKEN"
    assert token.stat().st_mode & 0o777 == 0o600
    assert (root.path / "etc/systemd/system/multi-user.target.wants/unbounded-agent.service").is_symlink()
