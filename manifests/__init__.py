"""Recipes and pins: what a person writes about model families and published checkpoints."""
