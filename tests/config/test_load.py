"""Every error of the configuration names the file and the key."""

from pathlib import Path

import pytest

from agent.config.load import load_config
from agent.model.errors import ConfigError
from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE
from tests.fakes.config_files import system_with
from tests.fakes.host import Host


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[machines.a]\ngpuz = 1", "machines.a.gpuz: unknown key; did you mean gpus?"),
        ("[machines.a]\ncount = 2", 'machines.a.count: unknown key; write gpus = "count=N", such as "count=2"'),
        ('[machines.a.nspawn]\ncapabilty = "x"', "machines.a.nspawn.capabilty: unknown key; did you mean capability?"),
        (
            "[machines.a]\ngpus = 4",
            'machines.a.gpus: must be "all", "count=N" or a list of PCI addresses and UUIDs, such',
        ),
        ("[machines.a.nspawn]\ncapability = 4", "machines.a.nspawn.capability: must be a string"),
        ("[machines.a.nspawn.extra.Files]\nBind = 4", "machines.a.nspawn.extra.Files.Bind: must be a string or a list"),
        ('[machines."a/b"]', "machines.a/b: 'a/b' is not a host name"),
        ('[machines.".."]', "machines...: '..' is not a host name"),
        ('[machines.a]\ngpus = "count=x"', "machines.a.gpus: "),
        ('[machines.a]\ngpus = ["nvidia0"]', "machines.a.gpus: "),
        ('[machines.a]\ngpus = ["0000:3b:00.8"]', "machines.a.gpus: '0000:3b:00.8' is neither a PCI address"),
        ('[machines.a]\nrequire_gpus = "yes"', "machines.a.require_gpus: "),
        ('[machines.a.nspawn.extra.Files]\nBind = "/a\\nBoot=no"', "machines.a.nspawn.extra.Files.Bind: "),
        ('[metrics]\naddress = "everywhere"\n[machines.a]', "metrics.address: 'everywhere' is not an address"),
        ('[metrics]\naddress = "127.0.0.1:99999"\n[machines.a]', "metrics.address: the highest port is 65535"),
        ('[metrics]\naddress = "127.0.0..1:9788"\n[machines.a]', "metrics.address: '127.0.0..1' is not a host: "),
        ('[machines.a]\ngpus = "count=0"', "machines.a.gpus: must be"),
        ('[machines.a]\ndevices = ["usb"]', "machines.a.devices: "),
        ('[[machines.a.extra_devices]]\npath = "/dev/nvidia0"', "machines.a.extra_devices: /dev/nvidia0 belongs"),
        ('[[machines.a.extra_devices]]\nmode = "r"', "machines.a.extra_devices.0.path: is missing"),
        ('[[machines.a.extra_devices]]\npath = "/dev/x"\nmoed = "r"', "machines.a.extra_devices.0.moed: unknown key"),
        (
            '[[machines.a.extra_mounts]]\nsource = "/"\ntarget = "/mnt"',
            "machines.a.extra_mounts: / is, contains or lies below a path",
        ),
        ("[machines.a]\ngpus = []", "machines.a.gpus: the list names no GPU"),
        ("[machines.a.nspawn]\nprivate_users = true", "machines.a.nspawn: a machine cannot have"),
        ('[machines.a.nspawn.extra.Exec]\nPrivateUsers = "pick"', "machines.a.nspawn: a machine cannot have"),
        ('[machines.a.nspawn.environment]\n"A\\nB" = "x"', "machines.a.nspawn.environment.A"),
        ('[machines.a.nspawn.extra.Files]\nBind = "/srv\\\\"', "machines.a.nspawn.extra.Files.Bind: "),
        ("machines = 3", "machines: must be a table"),
        ('[driver]\nload_modules = "yes"\n[machines.a]', "driver.load_modules: must be true or false"),
        ("[driver]\nload = true\n[machines.a]", "driver.load: unknown key"),
        ("", "machines: is missing"),
        ('[driver]\nroot = "run/nvidia"\n[machines.a]', "driver.root: 'run/nvidia' is not an absolute path"),
        ('[driver]\nroot = "/run/../etc"\n[machines.a]', "driver.root: '/run/../etc' is not an absolute path"),
        ('[driver]\nlibrary_directories = "/lib"\n[machines.a]', "driver.library_directories: must be a list"),
        ('[driver]\nlibrary_directories = ["/a", "b"]\n[machines.a]', "driver.library_directories: 'b' is not"),
        (
            '[driver]\nbinary_directories = ["/a"]\n[machines.a]',
            "driver: binary_directories and data_directories need root",
        ),
        ('[driver]\nroots = "/a"\n[machines.a]', "driver.roots: unknown key"),
        ('[machines.a]\ncontainerd_drop_in = "conf.d/a.toml"', "machines.a.containerd_drop_in: 'conf.d/a.toml' is not"),
        ('[machines.a]\ncontainerd_drop_in = "/etc/cri/conf.d/*.part"', "machines.a.containerd_drop_in: "),
        ('[machines.a]\ncontainerd_drop_in = "/etc/cri/../a.part"', "machines.a.containerd_drop_in: "),
        ('[machines.a]\ncontainerd_drop_in = "/etc/containerd/config.toml"', "machines.a.containerd_drop_in: "),
        ('[machines.a]\ncontainerd_drop_in = "/etc/cri/nvidia.yaml"', "machines.a.containerd_drop_in: "),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(system_with(tmp_path, main=text))
    assert str(raised.value).startswith(f"{CONFIG_FILE}: {named}")


def test_a_mistake_in_toml_shows_its_line(tmp_path: Path) -> None:
    """Without the value: everyone can read the error, and a secret may be there by mistake."""
    for text, expected in (
        ("[machines.a]\n  [machines.b\n", r"\(at line 2, column 14\): \[machines.b$"),
        ("[machines.a]\ngpus = hunter2\n", r": gpus = \.\.\.$"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){CONFIG_FILE}: not TOML.*{expected}") as raised:
            load_config(system_with(tmp_path, main=text))
        assert "hunter2" not in str(raised.value)


@pytest.mark.scenario("001")
def test_where_the_driver_is(tmp_path: Path) -> None:
    """Paths are normalised. A named root counts as configured, even if it is the host's own."""
    for setting, root, key in (
        ('root = "/run//nvidia/driver/"', "/run/nvidia/driver", "driver.root"),
        ('root = "/"', "/", "driver.root"),
        ('library_directories = ["/opt/lib"]', "", "driver.library_directories"),
        ("", "", ""),
    ):
        text = f'[machines.a]\ncontainerd_drop_in = "/etc/cri/conf.d/20-nvidia.part"\n[driver]\n{setting}\n'
        config = load_config(system_with(tmp_path, main=text))
        assert (config.driver.root, config.driver.place_key) == (root, key)
        assert config.machines["a"].containerd_drop_in == "/etc/cri/conf.d/20-nvidia.part"


@pytest.mark.parametrize(
    ("path", "owner", "expected"),
    [
        (
            CONFIG_FILE,
            (0o666, 0),
            f"users other than root can write to {CONFIG_FILE} (mode 0666): run `chmod go-w {CONFIG_FILE}`",
        ),
        (
            f"{CONFIG_DIRECTORY}/a.toml",
            (0o644, 1000),
            f"{CONFIG_DIRECTORY}/a.toml belongs to user 1000: run `chown root:",
        ),
        (CONFIG_DIRECTORY, (0o775, 0), f"users other than root can write to {CONFIG_DIRECTORY} (mode 0775)"),
        ("/srv/a.toml", (0o664, 0, 50), "users other than root can write to /srv/a.toml"),
        ("/srv", (0o777, 0), "users other than root can write to /srv (mode 0777)"),
    ],
)
def test_a_file_that_others_may_write_is_refused(host: Host, path: str, owner: tuple[int, ...], expected: str) -> None:
    """The configuration decides what root does, so root must own it. Of a link, the target counts."""
    host.file(CONFIG_FILE, "[machines.a]\n")
    host.file("/srv/a.toml", "[machines.a]\n")
    host.file(f"{CONFIG_DIRECTORY}/a.toml", "")
    host.symlink(f"{CONFIG_DIRECTORY}/b.toml", "/srv/a.toml")
    assert list(load_config(host).machines) == ["a"]
    host.owners[path] = owner  # type: ignore[assignment]
    with pytest.raises(ConfigError) as raised:
        load_config(host)
    assert expected in str(raised.value)
    assert list(load_config(host, "/srv/a.toml").machines) == ["a"]


@pytest.mark.parametrize("owner", [(0o755, 1000), (0o777, 0)])
def test_a_file_below_a_directory_of_others_is_refused(host: Host, owner: tuple[int, int]) -> None:
    """The owner of a directory above the target, or above a link on the way to it, can replace it."""
    host.file(CONFIG_FILE, "[machines.a]\n")
    host.file("/home/user/etc/a.toml", "")
    host.symlink("/home/user/links/b.toml", "/srv/b.toml")
    host.file("/srv/b.toml", "")
    for target in ("/home/user/etc/a.toml", "/home/user/links/b.toml"):
        host.remove(f"{CONFIG_DIRECTORY}/c.toml")
        host.symlink(f"{CONFIG_DIRECTORY}/c.toml", target)
        assert list(load_config(host).machines) == ["a"]
        host.owners["/home/user"] = owner
        with pytest.raises(ConfigError, match=r"it decides what root does on this host: .*/home/user"):
            load_config(host)
        host.owners.clear()


@pytest.mark.parametrize("name", [".#b.toml", ".ansible_tmpx3kdb.toml"])
def test_link_farms_are_accepted_and_hidden_files_are_no_settings(host: Host, name: str) -> None:
    """NixOS has the former: root's, in a directory that is sticky and group-writable.

    While somebody edits b.toml, Emacs has a dangling link next to it.
    """
    host.file("/nix/store/a.toml", "[machines.a]\n")
    host.symlink(CONFIG_FILE, "/nix/store/a.toml")
    host.owners["/nix/store"] = (0o1775, 0, 30000)
    host.symlink(f"{CONFIG_DIRECTORY}/{name}", "root@host.123")
    assert list(load_config(host).machines) == ["a"]


def test_missing_file_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[machines\.NAME\]"):
        load_config(system_with(tmp_path))


@pytest.mark.parametrize(
    "key", ["pod_environment.nvidia.TOKEN", "nspawn.environment.TOKEN", "nspawn.extra.Exec.Environment"]
)
@pytest.mark.parametrize("value", ['"""hunter2\nhunter2"""', '["hunter2\\n"]', '{ A = "hunter2" }', '"hunter2\\u0000"'])
def test_errors_do_not_repeat_what_may_be_a_secret(tmp_path: Path, key: str, value: str) -> None:
    """Everybody can read the condition and the page that show errors."""
    with pytest.raises(ConfigError) as raised:
        load_config(system_with(tmp_path, main=f"[machines.a]\n{key} = {value}\n"))
    assert f"machines.a.{key}" in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_drop_ins_are_merged_and_named(tmp_path: Path) -> None:
    """Tables are merged, later files win, and an error names the file that has the key."""
    system = system_with(tmp_path, main='[machines.a]\ngpus = "all"\n', b='[machines.a]\ngpus = "count=2"\n')
    assert load_config(system).machines["a"].gpus == "count=2"
    system.write(f"{CONFIG_DIRECTORY}/c.toml", b"[machines.a]\nwrong = 1\n")
    with pytest.raises(ConfigError, match=rf"{CONFIG_DIRECTORY}/c\.toml: machines\.a\.wrong: unknown key"):
        load_config(system)


@pytest.mark.parametrize("made", ["dangling link", "file"])
def test_a_directory_that_cannot_be_read_does_not_remove_its_machines(host: Host, made: str) -> None:
    """It may be a link to a file system that is not mounted."""
    host.file(CONFIG_FILE, "[machines.a]\n")
    if made == "file":
        host.file(CONFIG_DIRECTORY, "[machines.b]\n")
    else:
        host.symlink(CONFIG_DIRECTORY, "/srv/shared/config.d")
    with pytest.raises(ConfigError, match=f"cannot read .*{CONFIG_DIRECTORY}: N"):
        load_config(host)


def test_a_pci_address_as_tools_print_it(tmp_path: Path) -> None:
    """nvidia-smi prints eight digits of domain and capitals, lspci neither."""
    printed = '["01:00.0", "00000000:3B:00.0", "0001:3b:00.0", "10000:e1:00.0"]'
    system = system_with(tmp_path, main=f"[machines.a]\ngpus = {printed}\n")
    assert load_config(system).machines["a"].gpus == ["0000:01:00.0", "0000:3b:00.0", "0001:3b:00.0", "10000:e1:00.0"]
