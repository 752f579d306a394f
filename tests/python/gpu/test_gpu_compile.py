"""tests/python/test_compile.py on the GPU: full graphs, dynamic lengths, checkpointing, export. Called by pytest."""

from on_gpu import suite

globals().update(
    suite(
        "test_compile",
        skip={
            "test_compiled_module_trains": "with a default device, dynamo cannot trace Tensor.unflatten",
            "test_options_may_depend_on_the_length": "float32 runs on cuda_naive, which has no split_size",
            "test_autocast_casts_q_k_and_v_together": "autocast of the CPU; test_gpu_results.py has that of the GPU",
            "test_autocast_leaves_float64_alone": "float64 is for the CPU",
            "test_autocast_compiles": "autocast of the CPU",
        },
    )
)
