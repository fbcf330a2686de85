"""All access to files and processes. Importing one module does not load the others."""
