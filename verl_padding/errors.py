"""The errors of the plug-in, with one root; those of settings and data are ValueErrors as well."""


class PaddingError(Exception):
    """Root of every error that the plug-in raises at a user."""


class PaddingConfigError(PaddingError, ValueError):
    """A setting, or a combination of settings, that cannot be run; raised before any worker
    starts."""


class PaddingDataError(PaddingError, ValueError):
    """A row that cannot be planned or padded, raised before any row is dispatched; or rows that a
    worker lost."""
