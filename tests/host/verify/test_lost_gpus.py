"""How many GPUs a machine should have."""

import pytest

from agent.host.verify.readiness import expected_gpus

HAD = ("0000:01:00.0", "0000:02:00.0")


@pytest.mark.parametrize(
    ("wanted", "count"),
    [("all", 2), ("count=3", 3), ("count=0", 0), ([], 0), (["0000:01:00.0", "GPU-1", "GPU-2"], 3)],
)
def test_the_settings_say_how_many(wanted: str | list[str], count: int) -> None:
    assert expected_gpus(wanted, HAD) == count
