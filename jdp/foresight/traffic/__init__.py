"""What a step sends, compared with what its strategy promises.

`contract.py` is the promise and the comparison, `origin.py` finds the line and the parameter behind a collective,
`breaches.py` and `symptoms.py` put into words what is wrong.
"""
