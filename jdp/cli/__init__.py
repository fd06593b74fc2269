"""The command line, one module a command.

A module has the command's options, which `--help` shows, and what runs it.
"""
