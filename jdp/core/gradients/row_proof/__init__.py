"""Prove from a loss' program that it is a sum over rows. Begin in `proof`; `rules` has the rule of each primitive."""
