"""Generators of the documents in the packages."""
