"""A jitted step that jdp did not make: traced, moved to a target, and read like one of jdp's own."""
