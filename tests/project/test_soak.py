"""The soak's order of changes, and its rules for what counts as growth."""

from integration.bed.measure.soak import growth, turns


def test_new_entries_are_named_and_removed_ones_are_not_growth() -> None:
    before = {"descriptors": 12, "mounts": ["/a", "/b"], "units": ["one", "two"], "files": ["x"]}
    after = {"descriptors": 14, "mounts": ["/a", "/b", "/c"], "units": ["one"], "files": ["y"]}
    assert growth(before, after) == {"descriptors": 2, "mounts": ["/c"]}
    assert growth({"mounts": ["/a"]}, {"mounts": ["/a", "/a", "/a"]}) == {"mounts": 2}, "a mount on top of another"
    assert growth({"resident_kib": 50_000}, {"resident_kib": 55_000}) == {}, "memory may grow by a tenth"
    assert growth({"resident_kib": 50_000}, {"resident_kib": 55_001}) == {"resident_kib": 5_001}


def test_any_part_of_a_soak_has_all_changes() -> None:
    counts = {"cycles": 200, "switches": 50, "reports": 166}
    order = turns(counts)
    assert {kind: order.count(kind) for kind in counts} == counts
    half = order[: len(order) // 2]
    assert all(abs(half.count(kind) - count / 2) <= 1 for kind, count in counts.items())
