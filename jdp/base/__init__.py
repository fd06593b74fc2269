"""Tools that every package uses; nothing here imports another package of jdp.

formatting, shorten   numbers and values in messages; `notices` reports once, `hints` finds the nearest word
toml, words           values of experiment files; the words that settings take, as types
user_path             paths that a user gives; `hub_source` has the sources that `datasets` reads
machine               processors, memory and devices of this host; `cpu_allocator` keeps freed memory
progress_file         tells the supervisor (`jdp launch`) that a run has made progress; `timer` calls if code takes long
lasting_output        stdout and stderr that end no run when they cannot be written; `retrying` tries again what fails
terminal_text         text without control characters, in lines of a terminal's width
disk_cache            files that later processes read; `tree_paths` names leaves; `notebook` writes HTML tables
"""
