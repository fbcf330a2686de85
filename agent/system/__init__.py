"""The only door to files and processes. Importing a part of it loads no other."""
