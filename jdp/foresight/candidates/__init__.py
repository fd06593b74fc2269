"""What could be run instead: other meshes, the largest batch, the smallest cluster."""
