"""Self-contained pages.

They are, with their pictures, for people who decide what to launch and for those who look at what ran.
"""
