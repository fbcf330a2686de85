"""Format of the record of the last grant that was published to a machine. Pure."""

from agent.host.state.record import Record
from agent.model.granted import Granted

GRANTED = Record(Granted, 1)
