"""The releases of Kubernetes on which tests of Dynamic Resource Allocation run."""

from collections.abc import Callable

import pytest

from integration.bed.cluster.kubernetes import KUBERNETES, MODULES, NEXT_RELEASE, RELEASE
from integration.bed.tools import pinned


@pytest.fixture(scope="module", params=[RELEASE, pytest.param(NEXT_RELEASE, marks=pytest.mark.exhaustive)])
def release(request: pytest.FixtureRequest) -> str:
    """A release for ControlPlane. To build the next one takes some ten minutes, so its tests are exhaustive."""
    return str(request.param)


@pytest.fixture
def record_release(release: str, record_property: Callable[[str, object], None]) -> None:
    """Record the release in the test's result, from which docs/compatibility.md is made."""
    record_property("Kubernetes", pinned(MODULES / release, KUBERNETES))
