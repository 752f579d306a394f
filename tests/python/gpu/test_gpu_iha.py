"""tests/python/test_iha.py on the GPU. Called by pytest."""

from on_gpu import suite

globals().update(
    suite(
        "test_iha",
        skip={
            "test_module_takes_packed_input_and_names_itself": "names the CPU",
        },
    )
)
