"""The fault suite: crashes, faults, damage, fuzzing and attacks. See docs/reliability.md."""
