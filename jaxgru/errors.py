"""The one error that is the user's to mend."""


class UserError(ValueError):
    """Something asked for cannot be done; the message is one sentence that says why.

    Scripts print it in one line and exit 2, without a traceback.
    """
