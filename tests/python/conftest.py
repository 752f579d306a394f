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
