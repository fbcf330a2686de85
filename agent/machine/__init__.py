"""The machine half: it runs in the machine, acts on the host's handoff, and answers with a report.

At every boot containerd waits for it, and imports take time. So a run that changes nothing imports only the standard
library (tests/machine/test_run.py). Other libraries are imported where a file must be parsed or written.
"""
