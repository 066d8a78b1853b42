"""Triton kernels, one file an op; installed as `memopt.triton_kernels`.

Importing this package imports no Triton: a file does so when its op first runs on it.
"""
