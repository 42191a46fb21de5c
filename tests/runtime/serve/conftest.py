"""Servers over a tiny signed core, for every test of the debug server."""

from tests.served_core import server, start, tiny

__all__ = ["server", "start", "tiny"]
