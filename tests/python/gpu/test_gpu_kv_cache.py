"""tests/python/test_kv_cache.py on the GPU. Called by pytest."""

from on_gpu import suite

globals().update(
    suite(
        "test_kv_cache",
        skip={
            "test_several_threads": "threads",
            "test_strategies_and_the_oracle_agree": "the reference backend is on the CPU",
            "test_a_sequence_does_not_depend_on_its_batch": "half precision: test_gpu_decode.py",
            "test_inference_mode_and_autocast": "autocast of the CPU",
        },
    )
)
