"""Errors both packages raise. Each message says what was passed, what is supported, and what to do."""


class FaError(Exception):
    """Base of every error raised on purpose by fa_ref and fa_fast."""


class ProviderNotInstalled(FaError, ImportError):
    """The kernels for this device are not installed; the message carries the install line."""


class UnsupportedByProvider(FaError, NotImplementedError):
    """The request is meaningful, but the chosen provider cannot run it; the message names one that can."""


class BadConfig(FaError, ValueError):
    """A BackendConfig or AttentionLayer contradicts itself (chunk and page size, window and encoder, ...)."""


class BadBatch(FaError, ValueError):
    """A batch or an argument of a call has the wrong dtype, device, shape or length."""


class BadPageTable(FaError, ValueError):
    """A page table or a slot list addresses memory outside its pool, or is too narrow for its lengths."""
