"""All access to files, processes, the network, D-Bus and udev. Importing one module does not load the others."""
