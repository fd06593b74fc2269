"""The command line, one module per command.

A module has the command's options, which `--help` shows, and its `run` function.
"""
