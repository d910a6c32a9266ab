"""What tests of several folders share: one Ray and one TransferQueue a test session."""

from collections.abc import Iterator

import pytest

import tests.plain_output  # noqa: F401  (first of all)
from tests.cluster import ray_and_queue  # before anything of verl: it chooses verl's platform


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keeps what shares a fixture in one process: all tests on the session's queue, and the tests of a file."""
    shares_queue = "transfer_queue" in getattr(item, "fixturenames", ())
    item.add_marker(pytest.mark.xdist_group("queue" if shares_queue else str(item.path)))


@pytest.fixture(scope="session")
def transfer_queue() -> Iterator[None]:
    """A real TransferQueue on a real Ray, started once and shut down at the end."""
    with ray_and_queue():
        yield
