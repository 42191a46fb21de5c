"""From Triton source to the cubins and node tables of a core, and the witness that a device agrees."""
