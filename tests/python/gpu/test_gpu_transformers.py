"""tests/python/test_transformers.py on the GPU: whole models. Called by pytest."""

from on_gpu import suite

globals().update(
    suite(
        "test_transformers", skip={"test_unknown_mask_functions_are_evaluated": "it asks transformers for a CPU mask"}
    )
)
