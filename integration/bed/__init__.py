"""The test bed: a simulated GPU host in a virtual machine, and everything that is built for it."""
