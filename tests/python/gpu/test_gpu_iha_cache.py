"""tests/python/test_iha_cache.py on the GPU. Called by pytest."""

from on_gpu import suite

globals().update(suite("test_iha_cache", skip={}))
