"""The two errors that minikv raises for what a user can mend. Both are ValueErrors and both say what to do."""


class RequestError(ValueError):
    """This request cannot be served, and why. Nothing else is touched: other requests go on."""


class ModelError(ValueError):
    """This folder, file or shape is no model that minikv can load, and why."""
