"""Errors a caller can act on. Each message says what was asked, what there is, what to change."""


class KVGrainError(Exception):
    """Base of the errors that KVGrain raises on purpose."""


class PoolExhausted(KVGrainError):
    """A pool has no room for what was asked; the pool is as it was."""


class PoolCorrupted(KVGrainError):
    """Slots were freed twice, or the books of pool and index disagree."""


class RequestError(KVGrainError, ValueError):
    """A request is malformed or can never be served; nothing was changed."""


class ConfigError(KVGrainError, ValueError):
    """A configuration names something that does not exist or does not fit together."""
