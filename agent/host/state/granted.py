"""Format of the record of the last grant that was published to a machine. Pure."""

from pydantic import TypeAdapter

from agent.host.state.record import Record
from agent.model.granted import Granted

GRANTED = Record(TypeAdapter(Granted), 1)
