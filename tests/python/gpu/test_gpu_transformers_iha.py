"""tests/python/test_transformers_iha.py on the GPU: converted models. Called by pytest."""

from on_gpu import suite

globals().update(suite("test_transformers_iha", skip={}))
