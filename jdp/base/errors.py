"""The error that a user's mistake raises."""


class UserError(ValueError):
    """A mistake of the user: the message names the rule, the value given, and the fix.

    The command line prints the message and exits with code 2. Any other exception is a fault of the program: it prints
    its traceback and exits with code 70.
    """
