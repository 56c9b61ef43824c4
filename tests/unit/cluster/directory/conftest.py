import pytest
from told_directory import Cluster, two_workers


@pytest.fixture
def cluster() -> Cluster:
    return two_workers()
