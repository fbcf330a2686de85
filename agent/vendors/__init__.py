"""All knowledge of each vendor: `<vendor>/host.py` for the host half, listed in agent/host/vendors.py, and
`<vendor>/machine.py` for the machine half, listed in agent/machine/vendors.py."""
