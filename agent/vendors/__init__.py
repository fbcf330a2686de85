"""All code that depends on a vendor.

agent/host/vendors.py lists the vendors of the host half (`<vendor>/host.py`), agent/machine/vendors.py those of the
machine half (`<vendor>/machine.py`), and agent/dra/inventory.py those of agent.dra (`<vendor>/dra.py`).
"""
