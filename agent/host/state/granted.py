"""The record of the last grant published to a machine."""

from pydantic import TypeAdapter

from agent.host.state.record import Record
from agent.model.granted import Granted

GRANTED = Record(TypeAdapter(Granted), 1)
