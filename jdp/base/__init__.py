"""Tools that every package uses; nothing here imports another package of jdp.

errors       the error of a user's mistake, and short tracebacks of public functions
formatting   numbers, tables and names in messages, notebooks and terminals
notices      reports once, and tells the supervisor (`jdp launch`) that a run has made progress
signals      end the process at once, whatever the main thread does
toml, words  values of experiment files; the words that settings take, as types, with spelling hints
user_path    paths and sources that a user gives; `tree_paths` names leaves
machine      processors, memory and devices of this host
chips        published numbers of devices; `link_times` has NCCL's cost model
disk_cache   files that later processes read
"""
