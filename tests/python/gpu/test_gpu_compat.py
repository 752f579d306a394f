"""tests/python/test_compat.py on the GPU: the stand-ins for flash-attn 2 and 3. Called by pytest."""

from on_gpu import suite

globals().update(suite("test_compat", skip={}))
