"""Archives fetched by the clients of package registries: checked, read, and never run."""
