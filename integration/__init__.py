"""End-to-end tests and the simulated GPU host that they run on."""
