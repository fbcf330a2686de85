"""The machine half: it runs in the machine, acts on the host's handoff, and answers with a report.

It imports only the standard library, because it runs before containerd at every boot (tests/machine/test_run.py).
"""
