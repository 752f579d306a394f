"""tests/python/test_ops.py on the GPU: opcheck, fake layouts, nothing but plait inside. Called by pytest."""

from on_gpu import suite

globals().update(suite("test_ops", skip={}))
