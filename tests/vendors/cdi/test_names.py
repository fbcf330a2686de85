"""Names of devices in other programs' CDI specifications.

A device that runtimes accept is never overlooked: it is found, or the file is refused.
"""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agent.model.errors import DocumentError
from agent.vendors.cdi import device_names
from tests.fakes.cdi_specs import drm_spec
from tests.fakes.machine import recorded_spec

GENERATED = """\
---
cdiVersion: 0.5.0
kind: intel.com/gpu
containerEdits: {}
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/dri/card0
      type: c
    hooks:
    - name: hook
  name: card0
- name: "0000:03:00.0"
  containerEdits: {}
"""
ALL = ("intel.com/gpu=all",)
NEITHER = "neither JSON nor plain YAML"


def of_kind(devices: str) -> str:
    return f"kind: intel.com/gpu\ndevices:\n{devices}"


def test_specs_of_generators() -> None:
    """The generators are Go programs, which write YAML or JSON."""
    assert device_names(GENERATED) == ("intel.com/gpu=card0", "intel.com/gpu=0000:03:00.0")
    assert device_names(of_kind('    - name: "0"\n      containerEdits:\n        deviceNodes:\n')) == (
        "intel.com/gpu=0",
    )
    spec = drm_spec()
    assert device_names(json.dumps(spec)) == tuple(f"{spec['kind']}={device['name']}" for device in spec["devices"])
    # Runtimes convert a scalar to a string if they expect a string.
    assert device_names(of_kind("- name: 0\n- name: 17\n")) == ("intel.com/gpu=0", "intel.com/gpu=17")
    assert device_names('{"kind": "a.b/c", "devices": [{"name": 0}]}') == ("a.b/c=0",)
    # They take none of these for a number or a date (resolve.go), unlike PyYAML.
    assert device_names(of_kind("- name: 0000:00:02.0\n- name: 2026-11-29\n- {name: 1:30}\n")) == (
        "intel.com/gpu=0000:00:02.0", "intel.com/gpu=2026-11-29", "intel.com/gpu=1:30",
    )  # fmt: skip


@pytest.mark.parametrize("flow", [None, False, True])
@pytest.mark.parametrize("style", [None, "'", '"'])
@pytest.mark.parametrize("indent", [2, 4])
def test_specs_of_pyyaml(flow: bool | None, style: str | None, indent: int) -> None:
    for each in (recorded_spec(), drm_spec()):
        text = yaml.safe_dump(
            each, default_style=style, default_flow_style=flow, indent=indent, sort_keys=False, version=(1, 1)
        )
        assert device_names(text) == tuple(f"{each['kind']}={device['name']}" for device in each["devices"])


@pytest.mark.parametrize(
    "text",
    [
        "{kind: intel.com/gpu, devices: [{name: all}]}",
        "x: &x [{name: all}]\nkind: intel.com/gpu\ndevices: *x\n",
        "x: &x devices\nkind: intel.com/gpu\n*x : [{name: all}]\n",
        "x: &x {name: all}\nkind: intel.com/gpu\ndevices: [*x]\n",
        of_kind("- name: !!str all\n"),
        *(
            f"cdiVersion: {each}\n" + of_kind("- name: all\n")
            for each in ("9.9.9", "v0.5.0", "!!binary MC41LjA=", "[]")
        ),
        "kind: intel.com/gpu\ndevices: [{name: all}]\n...\n",
        "kind: intel.com/gpu\ndevices: [name: all]\n",
        "kind:\n  intel.com/gpu\n? devices\n: - name: all\n",
        'kind: "intel.com\\/gpu"\ndevices:\n- name: "\\x61ll"\n',
        of_kind("-\n  name: all\n"),
        of_kind("- name: >-\n    all\n"),
        of_kind("- &first\n  name: &x all\n"),
        of_kind("- name: all\n  containerEdits: &edits {}\ncontainerEdits: *edits\n"),
        "kind: 'intel.com/gpu'   # quoted\r\ndevices: # mine\r\n  # the first\r\n  -   name: all\r\n",
        "\ufeff" + of_kind('- containerEdits:\n    deviceNodes:\n    - name: x\n  "name": all # here\n'),
        '{"kind": "intel.com/gpu", "annotations": {"a.b/x": "", "a.b/X": ""}, "devices": [{"name": "all"}]}',
        of_kind("- name: all\n  annotations: {<<: {a: b}}\n"),
        of_kind(f"- name: all\n  annotations: {'[' * 90}{']' * 90}\n"),
        "KIND: intel.com/gpu\nDevices:\n- Name: all\n",
        '{"Kind": "intel.com/gpu", "Devices": [{"nAme": "all"}]}',
    ],
)
def test_every_style_that_runtimes_read(text: str) -> None:
    """The style does not matter. Runtimes turn YAML into JSON, and Go's JSON decoder ignores the case of keys."""
    assert device_names(text) == ALL


@pytest.mark.parametrize(
    "text",
    [
        "", "# nothing\n", "[]", "{}", "name: x\n", "kind: a.b/c\ndevices:\n", "kind: a.b/c\ndevices: x\n",
        "kind: a.b/c\ndevices: []\n", '{"kind": "a.b/c", "devices": [1, {}, {"name": []}]}',
        of_kind("- containerEdits: {}\n"), "kind: gpu\ndevices: [{name: all}]\n", "kind: a_/b\ndevices: [{name: x}]\n",
        "cdiVersion: new\n" + of_kind("- name: all\n"), "cdiVersion: 0.50\n" + of_kind("- name: all\n"),
        '{"cdiVersion": "x", "kind": "a.b/c", "devices": [{"name": "all"}]}',
    ],
)  # fmt: skip
def test_a_document_that_no_runtime_accepts_has_no_device(text: str) -> None:
    assert device_names(text) == ()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{\n", 2), ("- name: all\n", 1), (of_kind("  name: all\n"), 3), (of_kind("- all\n"), 3),
        (of_kind("\t- name: all\n"), 3), (of_kind("- name: all\n  name: x\n"), 4),
        (of_kind("- name: all\n  Name: x\n"), 4), (of_kind("- name: all\nkind: a.b/c\n"), 4),
        (of_kind("- name: all\n---\nkind: a.b/c\n"), 4), (of_kind("- name: card0\n- <<: *x\n"), 4),
        ("<<: {kind: intel.com/gpu}\ndevices: [{name: all}]\n", 1), (of_kind("- name: {}\n"), 3),
        (of_kind("- name: !!binary YWxs\n"), 3), (of_kind("- name: !!int abc\n"), 3),
        (of_kind("- &first\n  name: all\n- *first\n"), 3), (of_kind("- name: &x all\n- name: *x\n"), 3),
    ],
)  # fmt: skip
def test_ambiguous_documents_are_refused(text: str, line: int) -> None:
    with pytest.raises(DocumentError, match=rf"{NEITHER}, see line {line} \(write"):
        device_names(text)


@pytest.mark.parametrize(
    "name", ["yes", "N", "null", "~", "", "010", "0x1F", "0o17", "1_0", "1.0", "-0b1", ".5", "+1e3", "9" * 20]
)
def test_a_name_that_runtimes_turn_into_another_is_refused(name: str) -> None:
    with pytest.raises(DocumentError, match="see line 3"):
        device_names(of_kind(f"- name: {name}\n"))
    assert device_names(of_kind(f"- name: '{name}'\n")) == (f"intel.com/gpu={name}",)


@pytest.mark.parametrize("opening", ["[", "{", '{"a":', "- ", "? ", "{a: "])
@pytest.mark.parametrize("start", ["", "kind: a.b/c\ndevices: ", "kind: a.b/c\nannotations: "])
def test_attack_depth_costs_neither_time_nor_the_stack(opening: str, start: str) -> None:
    """libyaml alone would take minutes for the first case."""
    with pytest.raises(DocumentError, match=NEITHER):
        device_names(start + opening * 100_000)


def test_attack_an_alias_is_never_expanded() -> None:
    bomb = "".join(f"a{level}: &a{level} [{f'*a{level - 1},' * 9}]\n" for level in range(1, 50))
    assert device_names(f"a0: &a0 x\n{bomb}{of_kind('- name: all')}") == ALL
    # A pod can make a link in /etc/cdi to another file of the machine.
    with pytest.raises(DocumentError, match="see line 3") as raised:
        device_names("# a comment\nkind: a.b/c\nroot: *$6$secret:19000:0:99999:7:::\n")
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # YAML forbids these characters.
        *((of_kind(f"- name: {each}\n"), NEITHER) for each in "\udcff\x01"),
        # Which of two such keys counts for Go's decoder depends on the order in which the runtime passes them on.
        *(
            (f"{{{text}}}", "differ only in case")
            for text in (
                '"kind": "a.b/c", "Devices": [], "devices": [{"name": "all"}]',
                '"kind": "a.b/c", "Kind": "intel.com/gpu", "devices": [{"name": "all"}]',
                '"kind": "intel.com/gpu", "devices": [{"name": "x", "NAME": "all"}]',
                '"kind": "intel.com/gpu", "device\u017f": [{"name": "all"}], "devices": []',
            )
        ),
    ],
)
def test_characters_and_keys_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(DocumentError, match=why):
        device_names(text)


@given(st.text(alphabet="kind: devices\n-nm'\"#{}[]&ax*/\t", max_size=60))
def test_no_text_raises_another_error(text: str) -> None:
    with suppress(DocumentError):
        device_names(f"kind: a/b\n{text}")


def test_without_pyyaml_yaml_is_refused_and_json_is_read() -> None:
    """The image of a machine may not have the package; -S hides installed packages."""
    code = "from agent.vendors.cdi import device_names; import sys; print(device_names(sys.argv[1]))"

    def read(text: str) -> subprocess.CompletedProcess[str]:
        argv, path = [sys.executable, "-S", "-c", code, text], str(Path(__file__).parents[3])
        return subprocess.run(argv, capture_output=True, text=True, env={"PYTHONPATH": path})

    assert read('{"kind": "a.b/c", "devices": [{"name": "x"}]}').stdout == "('a.b/c=x',)\n"
    last = read(GENERATED).stderr.splitlines()[-1]
    assert last.startswith("agent.model.errors.DocumentError: not JSON, and PyYAML cannot be loaded: ")
    assert last.endswith("(install python3-yaml in this machine's image)")
