"""tests/python/test_attention.py on the GPU. Called by pytest."""

from on_gpu import suite

globals().update(
    suite(
        "test_attention",
        skip={
            "test_a_fixed_split_makes_results_independent_of_the_batch": "half precision: test_gpu_decode.py",
            "test_agrees_with_sdpa": "test_gpu_results.py compares with float64, not with another kernel of the GPU",
            "test_results_do_not_depend_on_threads_and_repeat_bit_for_bit": "threads",
        },
    )
)
