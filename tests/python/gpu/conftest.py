"""Tests that need a CUDA device; without one nothing here is collected. Called by pytest and scripts/gpu_test.sh.

Every tensor that a test makes without naming a device is made on the GPU, so the CPU suites run here as they are
(on_gpu.py).
"""

import sys
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config):
    config.addinivalue_line("markers", "two_gpus: needs a second GPU")
    config.addinivalue_line(
        "markers", "names_its_device: makes its tensors on the GPU by name, without a default device"
    )


def pytest_collection_modifyitems(items):
    lacks = pytest.mark.skip(reason="needs two GPUs")
    for item in items:
        if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
            item.add_marker(lacks)


@pytest.fixture(autouse=True)
def _on_the_gpu(request):
    if request.node.get_closest_marker("names_its_device"):
        yield
        return
    with torch.device("cuda"):
        yield
