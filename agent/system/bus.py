"""Names on the system bus: of PID 1, org.freedesktop.systemd1(5), and machined, org.freedesktop.machine1(5)."""

SYSTEMD = "org.freedesktop.systemd1"
SYSTEMD_OBJECT = "/org/freedesktop/systemd1"
SYSTEMD_MANAGER = f"{SYSTEMD}.Manager"
MACHINED = "org.freedesktop.machine1"
MACHINED_OBJECT = "/org/freedesktop/machine1"
MACHINED_MANAGER = f"{MACHINED}.Manager"
GET = "org.freedesktop.DBus.Properties.Get"
