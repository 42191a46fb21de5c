"""Triton kernels: one family per file, named after the op it computes, and how an op call becomes launches."""
