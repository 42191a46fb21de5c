"""Weights from a checkpoint's precision to a core's: one file per format, and the stream that applies them."""
