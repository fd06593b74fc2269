"""How a checkpoint is stored: its trees, content, checksums, and the file that commits it."""
