"""Environment variables that the configuration gives to pods. Pure.

They go into the CDI specification, whose variables override those of a pod's manifest and image (container-edits.go of
CDI's Go library). Therefore variables that other programs depend on are refused.
"""

import re
from typing import Annotated, Literal

from agent.config.table import Check, text

VariableName = Annotated[str, text(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable", longest=128)]
VariableValue = Annotated[
    str,
    text(
        r"[^\x00-\x1f\x7f]*",
        "one line of text",
        longest=1024,
        secret=True,
    ),
]
"""One line of text. No driver's variable needs a line break, so one in the configuration is a mistake."""
NUMBER_LIMIT = 32
"""The largest number of variables that may be set. The drivers know far fewer. More could slow down the start of
containers."""

REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("(NVIDIA|NVCT)_.*"), "the container runtime takes it for a request for devices, or sets it itself"),
    (re.compile("LD_.*|GLIBC_TUNABLES"), "the loader would obey it in each program of each image"),
    (re.compile("PATH"), "it would replace the image's own, with which its programs are found"),
    (re.compile("HOME|HOSTNAME|KUBERNETES_.*"), "each pod has its own"),
)
"""Patterns of names that are refused, and why."""


def _acceptable(variables: dict[str, str]) -> dict[str, str]:
    if len(variables) > NUMBER_LIMIT:
        raise ValueError(f"{len(variables)} variables are too many: the limit is {NUMBER_LIMIT}")
    for name in variables:
        for pattern, why in REFUSED:
            if pattern.fullmatch(name):
                raise ValueError(f"{name} may not be set for all pods: {why}")
    return variables


Variables = Annotated[dict[VariableName, VariableValue], Check(_acceptable)]
PodEnvironment = dict[Literal["nvidia"], Variables]
"""Variables by vendor. A pod gets only those of its device's vendor: another vendor's driver may misread them."""
