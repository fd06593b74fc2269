"""The end of a step (`optimizer`), and additions to optax: Muon under ZeRO, weight averages, learning rates."""
