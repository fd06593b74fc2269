"""The compiled program: `compiled.py` compiles it, `module.py` reads its text, `collectives.py` what it sends."""
