"""Tools that every package uses; nothing here imports another package of jdp.

formatting     numbers, tables and names in messages, notebooks and terminals; `notices` reports once
toml, words    values of experiment files; the words that settings take, as types, with spelling hints
user_path      paths that a user gives; `hub_source` parses sources that `datasets` reads; `tree_paths` names leaves
machine        processors, memory and devices of this host; `cpu_allocator` keeps freed memory
progress_file  tells the supervisor (`jdp launch`) that a run has made progress
disk_cache     files that later processes read
"""
