"""A jitted step that jdp did not make: traced, moved to a target, and read like a jdp step."""
