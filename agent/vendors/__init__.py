"""What is known of each vendor, and nowhere else: `<vendor>/host.py` for the host half, `<vendor>/machine.py` for
the machine half, each with one entry in the tuple of `host.py` or `machine.py` beside this file."""
