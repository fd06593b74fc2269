"""Copies of the state in the hosts' memory, so that a restart reads nothing from storage.

copies   the copies of a run: saved every few steps, found at the next start
parts    which process writes which part of an array, and which parts a neighbour also keeps; reads them again
host     the folder in a host's memory, its limits, leftovers of killed runs, and the files of parts
"""
