"""A cluster of processes, over JAX's coordination service: joined, waited for, and compared before it computes."""
