"""Traced programs (jaxprs).

graph        the reader and the runner: values, operations, calls, loops
jaxprs       one operation: what it runs, its source line, the same on other operands
collectives  the collectives that a program issues
axis_sizes   notes that a user's code asks for the size of a mesh axis
"""
