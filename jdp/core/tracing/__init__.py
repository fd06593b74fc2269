"""Traced programs (jaxprs): reading them (`jaxprs`), and the collectives that they issue (`collectives`)."""
