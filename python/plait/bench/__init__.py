"""Benchmarks that come with the package: `python -m plait.bench llama | sweep | cpu | prefill | ...`.

Called from the command line; `python -m plait.bench --help` lists options and examples.
"""
