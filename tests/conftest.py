"""What tests of several folders share: one Ray and one TransferQueue a process of tests."""

from collections.abc import Iterator

import pytest

import tests.support.parsed_once
import tests.support.plain_output  # noqa: F401  (first of all)
from tests.support.cluster import ray_and_queue  # before anything of verl: it chooses verl's platform


@pytest.fixture(scope="session")
def transfer_queue() -> Iterator[None]:
    """A real TransferQueue on a real Ray, started once and shut down at the end."""
    with ray_and_queue():
        yield
