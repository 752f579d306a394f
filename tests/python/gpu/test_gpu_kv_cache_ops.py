"""tests/python/test_kv_cache_ops.py on the GPU. Called by pytest."""

from on_gpu import suite

globals().update(suite("test_kv_cache_ops", skip={}))
