"""The data that devices send: encodings, error feedback, buckets.

settings     `jdp.Wire`
encodings    values in int8, fp8, top-k or low rank; `rounding` makes rounding stochastic, `feedback` keeps its error
buckets      reduces gradients in buckets
collectives  the collectives of the replica view, also where a `model` axis shards the model
"""
