"""The package's version, alone so that the build can read it without importing torch."""

__all__ = ["__version__"]

__version__ = "0.1.0"
