"""The commands of the command line, one module each: its options, which `--help` shows, and what runs it."""
