"""All access to files, processes, the network, D-Bus and udev. Importing a module loads only what that module needs."""
