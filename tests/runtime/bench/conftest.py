"""The tiny signed core that the debug server's tests use."""

from tests.served_core import tiny

__all__ = ["tiny"]
