"""The releases of Kubernetes on which tests of Dynamic Resource Allocation run."""

from collections.abc import Callable

import pytest

from integration.bed.cluster.kubernetes import KUBERNETES, NEXT_RELEASE, RELEASE, module_of
from integration.bed.tools import chosen, pinned

PINNED = [RELEASE, pytest.param(NEXT_RELEASE, marks=pytest.mark.exhaustive)]
RELEASES = [chosen("KUBERNETES")] if chosen("KUBERNETES") else PINNED


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """A release for ControlPlane. To build the next one takes some ten minutes, so its tests are exhaustive."""
    return str(request.param)


@pytest.fixture
def record_release(release: str, record_property: Callable[[str, object], None]) -> None:
    """Record the release in the test's result, from which docs/compatibility.md is made."""
    record_property("Kubernetes", pinned(module_of(release), KUBERNETES))
