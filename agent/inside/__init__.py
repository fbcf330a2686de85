"""The machine half: runs in the machine, acts on the host's handoff and answers with a report.

It imports the standard library alone, since it runs before containerd at every boot; `tests/test_inside.py` checks it.
"""
