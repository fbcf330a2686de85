"""All code that depends on a vendor. The host half's is in `<vendor>/host.py`, listed in agent/host/vendors.py; the
machine half's is in `<vendor>/machine.py`, listed in agent/machine/vendors.py."""
