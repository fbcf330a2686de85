"""The machine half: it runs in the machine, acts on the host's handoff, and answers with a report.

At every boot, containerd waits for the machine half, and imports take time. So a run that changes nothing imports only
the standard library (tests/machine/test_run.py). A function that needs another library imports it when it runs.
"""
