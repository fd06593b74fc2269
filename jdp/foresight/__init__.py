"""What a compiled step will send and hold, read before it is launched.

`targets` describes devices this machine need not have, so that XLA compiles the real step for them;
`hlo` reads every collective out of the program that comes back.
"""
