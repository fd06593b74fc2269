"""Compilation: XLA's options (`options`) and programs on disk (`persistent_cache`)."""
