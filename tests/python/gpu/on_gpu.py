"""Makes a suite of tests/python run on the GPU. Called by test_gpu_*.py beside it."""

import importlib
import sys

import torch


def suite(name, *, skip):
    """What module `name` defines, imported once more with the GPU as default device.

    skip: tests that say nothing here, with the reason.
    """
    cpu_module = sys.modules.pop(name, None)
    try:
        with torch.device("cuda"):
            module = importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)
        if cpu_module is not None:
            sys.modules[name] = cpu_module
    missing = set(skip) - set(vars(module))
    assert not missing, f"{name} has no {missing}"
    return {key: value for key, value in vars(module).items() if not key.startswith("__") and key not in skip}
