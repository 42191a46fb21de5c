"""Cores on NVIDIA GPUs, through the driver's own API: no torch, no numpy."""
