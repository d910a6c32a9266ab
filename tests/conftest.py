"""What tests of several folders share: one Ray and one TransferQueue a process of tests."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import tests.support.parsed_once
import tests.support.plain_output  # noqa: F401  (first of all)
from tests.support.cluster import ray_and_queue  # before anything of verl: it chooses verl's platform

# How long an example takes says nothing here: other processes of the tests have the cores, too.
settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")


@pytest.fixture(scope="session")
def transfer_queue() -> Iterator[None]:
    """A real TransferQueue on a real Ray, started once and shut down at the end."""
    with ray_and_queue():
        yield
