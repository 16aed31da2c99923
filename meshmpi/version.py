"""The version of the package; pyproject.toml names the same."""

VERSION = "0.1.0"
