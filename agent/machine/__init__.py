"""The machine half: it runs in the machine, acts on the host's handoff, and answers with a report.

It runs before containerd at every boot, so a run that changes nothing imports only the standard library
(tests/machine/test_run.py). Other libraries are imported where a file must be parsed or written.
"""
