"""Compilation: XLA's options (`options`), programs on disk (`persistent_cache`), repeated compilation (`remade`)."""
