"""The end of a step (`guarded`), and additions to optax: Muon under ZeRO, weight averages, learning rates."""
