"""Copies of the state in the hosts' memory, so that a restart reads nothing from storage.

copies         the copies of a run: saved every few steps, found at the next start
layout         which process writes which part of an array, and which parts a neighbour also keeps
generation     one process' parts of one step: a file in memory, and its index, which commits it
host           the folder in a host's memory, its limits, and leftovers of killed runs
exchange       sends parts to the next host; reads a generation: parts of this host from its memory, others from the
               hosts that have them
"""
