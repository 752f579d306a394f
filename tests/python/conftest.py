"""Seeds, thread count and hypothesis profile of every Python test. Called by pytest."""

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "plait", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("plait")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_thread():
    """For small work, in which threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
