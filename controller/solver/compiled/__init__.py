"""Compiled kernels (numba). Imported only while solving: the command line and the API start without them."""
